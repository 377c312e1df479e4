"""Traces the walks of CONTRIBUTING.md in real runs, and counts their files and types.

    python .ci/walks.py            # the counts, and what the text names but no run has called
    python .ci/walks.py --files    # and the files of each walk, in the order of their first call

A walk is what a reader follows from a cause to its effect. Each is a small real run. Of its calls
count those of one step: the step with the fault, up to its effect on disk or on the console. Of a
killed run count those of the next start. A file counts if a function of it was called, a type if a
method of it was called. The calls before that (the run is opened, its engine is recorded) do not
count, but a walk may name them.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PAGE = ROOT / "CONTRIBUTING.md"


class Trace:
    """Records which functions of healcore are called between `start` and `stop`."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}
        """(file, qualified name) of each function that counts, in the order of the first call."""
        self.uncounted: set[tuple[str, str]] = set()
        """Functions that were called before the step that counts."""
        self.types: set[str] = set()
        self._counts = True

    def start(self, *, counts: bool = True) -> None:
        """Begins to record, in this thread only: the writer of the store has no decisions.

        Args:
            counts: whether the calls are of the step that counts.
        """
        self._counts = counts
        sys.setprofile(self._on_call)

    def stop(self) -> None:
        """Ends the recording."""
        sys.setprofile(None)

    @property
    def files(self) -> list[str]:
        """The files, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def has_called(self, file: str, name: str) -> bool:
        """Whether a function was called, or a method of a class.

        Args:
            file: end of the path of its file, or "" for any file.
            name: its name, with or without the class; or the name of a class, or "" for any
                function of the file.
        """
        for path, function in [*self.functions, *self.uncounted]:
            if file and not f"/{path}".endswith(f"/{file}"):
                continue
            # The function itself, its inner functions, a method of the class.
            if not name or f".{name}." in f".{function}.":
                return True
        return False

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
        if not code.co_flags & inspect.CO_OPTIMIZED:  # a module or class that is imported only now
            return
        if not self._counts:
            self.uncounted.add((name, code.co_qualname))
            return
        self.functions.setdefault((name, code.co_qualname))
        owner = frame.f_locals.get("self")
        if owner is not None:
            self.types.add(type(owner).__qualname__)


def torch_loss_to_rollback() -> Trace:
    """A loss in torch, whose rollback is on disk; and a second one.

    At step 150 the weights become NaN, which a rule of the policy answers. At step 300 they change
    by 1, which only a comparison with earlier weights finds.
    """
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
    trace.start(counts=False)
    with tempfile.TemporaryDirectory() as folder:
        healer = healcore.Healer(
            state={"model": model, "optimizer": optimizer},
            store=folder,
            loss_fn=loss_of,
            checkpoints=healcore.Checkpoints(every=20),
            logging=healcore.Logging(console=False),
        )
        with healer:
            damaged = 0
            for batch in healer.batches(rows):
                if damaged and healer.rollbacks == damaged:
                    trace.stop()
                if healer.step == 150 and damaged == 0:
                    with torch.no_grad():
                        model.weight.fill_(torch.nan)
                    damaged += 1
                    trace.start()
                if healer.step == 300 and damaged == 1:
                    with torch.no_grad():
                        model.weight.add_(1.0)
                    damaged += 1
                    trace.start()
                optimizer.zero_grad()
                healer.loss(batch).backward()
                optimizer.step()
            trace.stop()
            assert healer.rollbacks == 2, "the run was not rolled back twice"
    return trace


def jax_step() -> Trace:
    """A run in JAX; the trace is of the compilation of its step, then of a step with NaN.

    The compiled step serves healthy gradients and NaN. The trace ends after the host has read the
    record of the step with NaN, and of healthy steps after it.
    """
    import jax
    import jax.numpy as jnp
    import optax

    import healcore
    from healcore.jax import protect

    trace = Trace()
    jax.clear_caches()  # of an earlier walk: what is cached is not called
    trace.start(counts=False)
    tx = protect(optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2))
    params = {"w": jnp.ones(8)}
    state = {"params": params, "opt_state": tx.init(params)}

    def step(state: Any, number: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.square(p["w"] - 0.5).sum())(state["params"])
        bad = jnp.where(number == 40, jnp.nan, 1.0)
        grads = jax.tree.map(lambda leaf: leaf * bad, grads)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}

    trace.start()
    compiled = jax.jit(step).lower(state, 0).compile()
    trace.stop()
    with tempfile.TemporaryDirectory() as folder:
        healer = healcore.Healer(state=state, store=folder, logging=healcore.Logging(console=False))
        with healer:
            for number in healer.steps(60):
                if number == 40:
                    trace.start()
                healer.update(compiled(healer.state, number))
                if number == 46:  # by now the host has read steps 40 to 43
                    trace.stop()
    return trace


def train_in_torch(folder: str, on_batch: Callable[[int, Any], bool]) -> None:
    """Trains in torch, on a list of 64 batches: batch n is filled with n.

    Args:
        folder: the store. A run in it is resumed.
        on_batch: step, batch -> whether to train on the batch. The first False ends the loop.
    """
    import torch

    import healcore
    from healcore.torch import DCPStore

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store = DCPStore(folder)
    healer = healcore.Healer(
        state={"model": model, "optimizer": optimizer},
        store=store,
        checkpoints=healcore.Checkpoints(every=20),
        logging=healcore.Logging(console=False),
    )
    with healer:
        for batch in healer.batches([torch.full((8, 8), float(number)) for number in range(64)]):
            if healer.step == 30:
                store.wait()  # the checkpoint of step 20 is on disk
            if not on_batch(healer.step, batch):
                break
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def killed_at_30(folder: str) -> None:
    """Runs in a process of its own, and kills that process at step 30."""

    def kill(step: int, batch: Any) -> bool:
        if step == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    train_in_torch(folder, kill)


def killed_run_to_next_batch() -> Trace:
    """A run that was killed at step 30: the next start of its program, up to the first batch."""
    trace = Trace()
    first: list[tuple[int, float]] = []

    def stop(step: int, batch: Any) -> bool:
        trace.stop()
        first.append((step, float(batch.mean())))
        return False

    program = f"import runpy, sys; runpy.run_path({__file__!r})['killed_at_30'](sys.argv[1])"
    with tempfile.TemporaryDirectory() as folder:
        killed = subprocess.run([sys.executable, "-c", program, folder], check=False)
        assert killed.returncode == -signal.SIGKILL, "the program was not killed at step 30"
        trace.start()
        train_in_torch(folder, stop)
    assert first == [(20, 20.0)], "the run has not resumed at batch 20"
    return trace


def toml_to_comparison() -> Trace:
    """A threshold in a policy file, to the comparison of a loss with it."""
    import numpy as np

    from healcore.core.signals import Signals
    from healcore.policy import load

    trace = Trace()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "mine.toml")
        path.write_text('schema = 1\nname = "mine"\n[detect.loss_spike]\nz_threshold = 5.0\n')
        trace.start()
        engine = load(path).engine()
        engine.step(engine.init(), Signals(loss=np.float32(2.0)))
        trace.stop()
    return trace


def csv_to_table() -> Trace:
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
    "A loss in torch, to a finished rollback": torch_loss_to_rollback,
    "A step in JAX, to its record on the host": jax_step,
    "A killed run, to its next batch": killed_run_to_next_batch,
    "A threshold in TOML, to the comparison with it": toml_to_comparison,
    "A CSV, to the table of `healcore replay`": csv_to_table,
}
"""Heading of the walk in CONTRIBUTING.md -> its run. The page has the first three."""
COUNTED_ONLY = [*WALKS][3:]


# -- what the text names --------------------------------------------------------------------------

NOT_CALLED = {"healcore/runtime/driver.py"}
"""Files that a walk names as an alternative, or for a protocol."""
OTHER_WORDS = {"b2", "loadtxt"}
"""Names of other libraries that the code of healcore does not use as identifiers."""
QUOTED = re.compile(r"`(?:([\w/]+\.py)(?::([\w.]+))?|((?:\w+\.)?\w+)(?:\(\))?)`")


def text_of(heading: str) -> str:
    """The lines of a walk in CONTRIBUTING.md, up to the next heading; none if only counted."""
    _, found, rest = PAGE.read_text().partition(f"**{heading}**")
    assert found or heading in COUNTED_ONLY, f"CONTRIBUTING.md has no walk **{heading}**"
    return re.split(r"^(?:\*\*|## )", rest, maxsplit=1, flags=re.M)[0]


class Definitions:
    """What the code of healcore defines.

    Attributes:
        by_file: path of a file -> its functions, classes and methods as `Class.method`.
        functions: all of these names in one set, a method also without its class.
        words: every identifier in the code, of other libraries too.
    """

    def __init__(self) -> None:
        self.by_file: dict[str, set[str]] = {}
        self.functions: set[str] = set()
        self.words: set[str] = set()
        for folder in ("healcore", "adapters"):
            for path in sorted((ROOT / folder).rglob("*.py")):
                self._add(str(path.relative_to(ROOT)), ast.parse(path.read_text()))

    def _add(self, file: str, tree: ast.Module) -> None:
        names = self.by_file[file] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.ClassDef):
                names.add(node.name)
                methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
                names.update(f"{node.name}.{each}" for each in methods)
                self.functions.update(methods)
            elif isinstance(node, ast.Name):
                self.words.add(node.id)
            elif isinstance(node, ast.Attribute):
                self.words.add(node.attr)
            elif isinstance(node, ast.arg):
                self.words.add(node.arg)
        self.functions |= {each for each in names if not each[0].isupper() or "." in each}
        self.words |= names

    def has(self, file: str, name: str) -> bool:
        """Whether a name exists; `file` is the end of a path, or "" for any file."""
        if not file:
            return name in self.functions or set(name.split(".")) <= self.words
        for path, names in self.by_file.items():
            if f"/{path}".endswith(f"/{file}") and (not name or name in names):
                return True
        return False


def named(heading: str) -> Iterator[tuple[str, str]]:
    """Yields (end of a file's path or "", name or "") of each name in backticks of a walk."""
    for file, name, alone in QUOTED.findall(text_of(heading)):
        if file:
            yield file, name
        else:
            yield "", alone


def not_defined(heading: str, code: Definitions) -> list[str]:
    """What the text of a walk names and the code does not have."""
    missing = []
    for file, name in named(heading):
        if f"{file}{name}" not in OTHER_WORDS and not code.has(file, name):
            missing.append(f"{file}:{name}".strip(":"))
    return missing


def not_called(heading: str, trace: Trace, code: Definitions) -> list[str]:
    """What the text of a walk names although its run has not called it.

    A name without a file counts if it is a function: other names are values and types.
    """
    wrong = []
    for file, name in named(heading):
        is_function = bool(file) or name in code.functions
        if is_function and file not in NOT_CALLED and not trace.has_called(file, name):
            wrong.append(f"{file}:{name}".strip(":"))
    return wrong


def main() -> int:
    """Prints the count of each walk. Returns 1 if the text names what a run has not called."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--files", action="store_true", help="name the files and their functions")
    options = parser.parse_args()
    code = Definitions()
    status = 0
    for heading, walk in WALKS.items():
        trace = walk()
        in_text = {file for file, _ in named(heading) if file}
        print(
            f"{heading}: {len(in_text)} files named, {len(trace.files)} files and "
            f"{len(trace.types)} types called"
        )
        if options.files:
            for file in trace.files:
                called = [function for place, function in trace.functions if place == file]
                print(f"    {file}: {', '.join(called)}")
        wrong = [*not_defined(heading, code), *not_called(heading, trace, code)]
        if wrong:
            status = 1
            print(f"    named in CONTRIBUTING.md, and not called: {', '.join(wrong)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
