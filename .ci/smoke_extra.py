"""Smoke test of one extra, run by release_check.py in a clean environment, outside the checkout.

Usage: python -I smoke_extra.py EXTRA   (a name in SMOKES, or all)

`make test-lowest` runs all, with the lowest versions.
"""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import tempfile
from pathlib import Path


def _healcore(*arguments: str) -> None:
    program = "import sys; from healcore.tools.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (arguments, done.stdout, done.stderr)


def torch_extra(folder: Path) -> None:
    """A loop with a NaN loss under a Healer: the step is skipped, checkpoints are on disk."""
    import torch

    import healcore

    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches = [torch.randn(8, 4) for _ in range(20)]
    batches[5][0] = math.nan
    state = {"model": net, "optimizer": optimizer}
    with healcore.Healer("default", state=state, store=str(folder / "run")) as healer:
        for batch in healer.batches(batches):
            loss = net(batch).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert healer.step == 20
    assert all(bool(each.isfinite().all()) for each in net.parameters())
    assert any((folder / "run").iterdir())


def jax_extra(folder: Path) -> None:
    """A jitted step whose NaN loss is skipped; a checkpoint on disk; the helpers for Flax."""
    import jax
    import jax.numpy as jnp
    import optax

    import healcore.jax
    from healcore.jax import flax_linen, flax_nnx

    assert flax_linen.HealTrainState
    assert flax_nnx.update
    tx = healcore.jax.protect(optax.adamw(0.1), policy="default")
    params = {"w": jnp.ones(3)}
    state = tx.init(params)

    @jax.jit
    def step(params, state, scale):
        loss, grads = jax.value_and_grad(lambda p: scale * (p["w"] ** 2).sum())(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params, state = step(params, state, 1.0)
    after, state = step(params, state, math.nan)
    assert bool(healcore.jax.last_decision(state).skip)
    assert bool((after["w"] == params["w"]).all())
    store = healcore.jax.OrbaxStore(folder / "run")
    store.save(1, {"params": params, "opt_state": state})
    store.wait()
    assert [each.step for each in store.checkpoints()] == [1]


def huggingface_extra(folder: Path) -> None:
    """Two epochs of a Trainer with one NaN label."""
    import torch
    from transformers import Trainer, TrainingArguments

    from healcore.torch import HealingCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, labels):
            out = self.layer(x).squeeze(-1)
            return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}

    rows = [{"x": torch.randn(4), "labels": torch.tensor(0.5)} for _ in range(64)]
    rows[20]["labels"] = torch.tensor(math.nan)
    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=2, report_to="none", disable_tqdm=True,
        use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    net, callback = Net(), HealingCallback("default")
    Trainer(model=net, args=arguments, train_dataset=rows, callbacks=[callback]).train()  # pyright: ignore
    assert all(bool(each.isfinite().all()) for each in net.parameters())
    assert callback.healing is not None
    assert callback.healing.metrics()["heal/skips"] > 0


def lightning_extra(folder: Path) -> None:
    """A fit with one NaN row."""
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from healcore.torch import LightningHealingCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return (self.layer(batch[0]) ** 2).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    x = torch.randn(64, 4)
    x[20] = math.nan
    net = Net()
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=str(folder),
        callbacks=[LightningHealingCallback("default", store=str(folder / "run"))],
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(x), batch_size=8))
    assert all(bool(each.isfinite().all()) for each in net.parameters())


def tensorboard_extra(folder: Path) -> None:
    """A replay of an event file."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step in range(100):
        value = summary_pb2.Summary.Value(tag="train/loss", simple_value=2.0 - step / 100)
        summary = summary_pb2.Summary(value=[value])
        writer.add_event(event_pb2.Event(wall_time=step, step=step, summary=summary))
    writer.close()
    _healcore("replay", str(folder))


def report_extra(folder: Path) -> None:
    """A page of a replay."""
    rows = "\n".join(f"{step},{2.0 - step / 100}" for step in range(100))
    (folder / "log.csv").write_text(f"step,loss\n{rows}\n")
    page = folder / "page.html"
    _healcore("replay", str(folder / "log.csv"), "--report", str(page))
    assert "<html" in page.read_text()


SMOKES = {
    "torch": torch_extra,
    "jax": jax_extra,
    "huggingface": huggingface_extra,
    "lightning": lightning_extra,
    "tensorboard": tensorboard_extra,
    "report": report_extra,
}


def main() -> None:
    """Runs the smoke test of an extra, or of all."""
    logging.disable(logging.WARNING)
    for name in SMOKES if sys.argv[1] == "all" else sys.argv[1:]:
        with tempfile.TemporaryDirectory() as folder:
            SMOKES[name](Path(folder))
        print(f"{name}: ok")


if __name__ == "__main__":
    main()
