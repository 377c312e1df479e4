"""Traces the four walks of CONTRIBUTING.md in real runs, and counts their files and types.

    python .ci/walks.py            # the counts
    python .ci/walks.py --files    # and the files of each walk, in the order of their first call

A walk is what a reader follows from a cause to its effect. Each is a small real run. Of its calls
count those of one step: the step with the fault, up to its effect on disk or on the console. A file
counts if a function of it was called, a type if a method of it was called.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


class Trace:
    """Records which functions of healcore are called between `start` and `stop`."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}
        """(file, qualified name) of each function, in the order of the first call."""
        self.types: set[str] = set()

    def start(self) -> None:
        """Begins to record, in this thread only: the writer of the store has no decisions."""
        sys.setprofile(self._on_call)

    def stop(self) -> None:
        """Ends the recording."""
        sys.setprofile(None)

    @property
    def files(self) -> list[str]:
        """The files, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or "site-packages" in path.parts:
            return
        name = str(path.resolve().relative_to(ROOT))
        if not name.startswith(("healcore/", "adapters/")):
            return
        if code.co_name == "<module>":  # an import that happens at first use
            return
        self.functions.setdefault((name, code.co_qualname))
        owner = frame.f_locals.get("self")
        if owner is not None:
            self.types.add(type(owner).__qualname__)


def torch_loss_to_rollback() -> Trace:
    """A loss in torch, whose rollback is on disk: the batch at step 150 damages the weights."""
    import torch

    import healcore

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(4096, 8)
    y = x.sum(1, keepdim=True)
    rows = list(zip(x.split(8), y.split(8), strict=True))

    def loss_of(batch: Any) -> Any:
        return (model(batch[0]) - batch[1]).square().mean()

    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        healer = healcore.Healer(
            state={"model": model, "optimizer": optimizer},
            store=folder,
            loss_fn=loss_of,
            checkpoints=healcore.Checkpoints(every=20),
            logging=healcore.Logging(console=False),
        )
        with healer:
            for batch in healer.batches(rows):
                if healer.step == 150 and not healer.rollbacks:
                    with torch.no_grad():
                        model.weight.fill_(torch.nan)
                    trace.start()
                optimizer.zero_grad()
                healer.loss(batch).backward()
                optimizer.step()
                if healer.rollbacks:
                    trace.stop()
            assert healer.rollbacks, "the run was not rolled back"
    return trace


def jax_steps(nan_at: int | None) -> Trace:
    """A run in JAX; the trace is of one eager step and of what the Healer does with it.

    Args:
        nan_at: step whose gradients are NaN, or None for a healthy run.
    """
    import jax
    import jax.numpy as jnp
    import optax

    import healcore
    from healcore.jax import protect

    tx = protect(optax.adamw(1e-2))
    params = {"w": jnp.ones(8)}
    state = {"params": params, "opt_state": tx.init(params)}

    def step(state: Any, number: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(p["w"] - 0.5).sum())(state["params"])
        bad = jnp.nan if nan_at is None else jnp.where(number == nan_at, jnp.nan, 1.0)
        if nan_at is not None:
            grads = jax.tree.map(lambda leaf: leaf * bad, grads)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        healer = healcore.Healer(state=state, store=folder, logging=healcore.Logging(console=False))
        with healer:
            compiled = jax.jit(step)
            for number in healer.steps(60):
                if number == 40:
                    jax.eval_shape(step, healer.state, number)
                    trace.start()
                    jax.make_jaxpr(step)(healer.state, number)  # the step as it is traced
                healer.update(compiled(healer.state, number))
                if number == 46:  # by now the host has read step 40
                    trace.stop()
    return trace


def csv_to_verdict() -> Trace:
    """A CSV with a spike, to the table that `healcore replay` prints."""
    from healcore.tools.cli import app

    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "log.csv")
        lines = ["step,loss,grad_norm"]
        for number in range(200):
            loss = 9.0 if number == 150 else 1.0 + 0.01 * (number % 7)
            lines.append(f"{number},{loss},{loss}")
        path.write_text("\n".join(lines) + "\n")
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            trace.start()
            app(["replay", str(path)], standalone_mode=False)
            trace.stop()
        assert "150" in output.getvalue(), "replay has not named the spike"
    return trace


WALKS: dict[str, Callable[[], Trace]] = {
    "torch loss to a rollback on disk": torch_loss_to_rollback,
    "healthy JAX step": lambda: jax_steps(None),
    "NaN in JAX to event and line": lambda: jax_steps(40),
    "CSV to verdict": csv_to_verdict,
}


def main() -> None:
    """Prints the count of each walk."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--files", action="store_true", help="name the files and their functions")
    options = parser.parse_args()
    for name, walk in WALKS.items():
        trace = walk()
        print(f"{name}: {len(trace.files)} files, {len(trace.types)} types")
        if options.files:
            for file in trace.files:
                functions = [function for place, function in trace.functions if place == file]
                print(f"    {file}: {', '.join(functions)}")


if __name__ == "__main__":
    main()
