"""transformers' Trainer and FSDP2 on one device."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch

from benchmarks.gpu_kit.device import CUDA, DEVICE, regression
from healcore.torch import attach


def huggingface() -> dict[str, Any]:
    """A Trainer with the callback, in bfloat16 on CUDA, with one batch whose loss is NaN."""
    import accelerate  # the Trainer needs it
    import transformers

    from healcore.torch import HealingCallback

    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    rows = torch.randint(0, 64, (160, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    callback = HealingCallback("default")

    class Trainer(transformers.Trainer):
        seen = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss: Any = super().compute_loss(*args, **kwargs)
            self.seen += 1
            return loss * math.nan if self.seen == 20 else loss

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=4,
            max_steps=40,
            bf16=CUDA,
            optim="adamw_torch_fused",
            report_to=[],
            save_strategy="no",
            use_cpu=not CUDA,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])  # type: ignore[arg-type]
        trainer.train()
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())
    assert callback.healing is not None
    assert callback.healing.metrics()["heal/skips"] == 1
    versions = {"transformers": transformers.__version__, "accelerate": accelerate.__version__}
    return {**versions, "steps": trainer.state.global_step, "skips": 1}


def fsdp2() -> dict[str, Any]:
    """Parameters that are DTensors on a mesh of one device: a NaN is skipped."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if CUDA:
        torch.cuda.set_device(0)
    kind = "nccl" if CUDA else "gloo"
    dist.init_process_group(kind, store=dist.HashStore(), rank=0, world_size=1)  # pyright: ignore[reportPrivateImportUsage]
    try:
        model, batch, loss_fn = regression()
        mesh = init_device_mesh(DEVICE.type, (1,))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        heal = attach(optimizer, "default")
        for number in range(30):
            loss = loss_fn(batch(number)) * (math.nan if number == 20 else 1.0)
            heal.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert heal.state_dict()["state"]["tally"]["skips"] == 1
        assert all(bool(torch.isfinite(each.to_local()).all()) for each in model.parameters())  # type: ignore[operator]
        assert (heal.live_engine.device is not None) == CUDA
        return {"engine": "device" if CUDA else "host", "skips": 1}
    finally:
        dist.destroy_process_group()
