"""The first table of docs/support.md says what each entry point does.

Each entry point trains on batches of which one is NaN, one cannot be read and one does not fit into
memory. What the run then shows is compared with the table, in both directions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

import healcore.jax
import healcore.torch
from healcore import Healer
from healcore import policy as policies
from healcore.errors import EndRequested
from healcore.events import log as event_log
from healcore.torch import HealingCallback, LightningHealingCallback
from tests.healer.run_options import grouped
from tests.healer.training_loops import Faults, JaxLoop
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.lightning import fits

PAGE = Path(__file__).parents[2] / "docs" / "support.md"
NAN, UNREADABLE, TOO_LARGE = 23, 31, 35
"""Numbers of the batches."""
STEPS = 40
POLICY = policies.loads(
    """
schema = 1
name = "everything"
[detect.nonfinite]
[[respond]]
to = ["nonfinite"]
do = ["skip", "rollback"]
[[respond]]
to = ["data"]
do = ["skip_batch"]
[[respond]]
to = ["oom"]
do = ["shrink_microbatch"]
[incident]
quiet_steps = 2
[rollback]
probation = 4
region = 30
"""
)


def section() -> str:
    """The part of the page that has the table."""
    return PAGE.read_text().split("\n## Entry points\n")[1].split("\n## ")[0]


@cache
def table() -> dict[str, dict[str, bool]]:
    """Feature -> entry point -> whether it has the feature. A row may name several features."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")]
        for line in section().splitlines()
        if line.startswith("|") and not line.startswith("|-")
    ]
    assert rows[0][0] == "feature"
    names = [cell.replace("`", "") for cell in rows[0][1:]]
    assert all(cell in ("yes", "no") for row in rows[1:] for cell in row[1:])
    return {
        feature.replace("`", ""): dict(zip(names, [c == "yes" for c in row[1:]], strict=True))
        for row in rows[1:]
        for feature in re.split(r", (?=`)", row[0])
    }


class Recorder:
    """A tracker, and the functions of all hooks."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.seen.add("trackers")

    def event(self, event: Any) -> None:
        self.seen.add("trackers")

    def options(self) -> dict[str, Any]:
        return {
            "on_incident": lambda _: self.seen.add("on_incident"),
            "on_saved": lambda _: self.seen.add("on_saved"),
            "on_rollback": lambda _: self.seen.add("on_rollback"),
            "trackers": self,
        }


class Rows(torch.utils.data.Dataset):
    """One batch a row; one row cannot be read."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if index == UNREADABLE * small_runs.BATCH:
            raise OSError("this row is no image")
        return self.rows[index]


class OutOfMemory:
    """A forward hook that raises once a batch is larger than `rows`, from a certain call on."""

    def __init__(self, rows: int) -> None:
        self.rows, self.calls, self.split = rows, 0, False

    def __call__(self, module: Any, args: Any) -> None:
        self.calls += 1
        rows = len(args[0])
        self.split |= self.calls > TOO_LARGE and rows <= self.rows
        if self.calls > TOO_LARGE and rows > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def found_in(folder: Path) -> set[str]:
    """What the events of a run show."""
    paths = list(folder.rglob("*events.jsonl"))
    if not paths:
        return set()
    kinds = [
        (event["kind"], event.get("answer")) for p in paths for event in event_log.read(p).events
    ]
    found = {"events and postmortem"} if list(folder.rglob("*postmortem*.json")) else set()
    if any(kind == "rollback" for kind, _ in kinds):
        found.add("rollback in the running program")
    if ("fault", "skip_batch") in kinds:
        found.add("skip_batch for unreadable data")
    return found


def taken(make: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that an entry point takes; it raises TypeError for each of the others."""
    kept = {}
    for name, value in options.items():
        try:
            make(**{name: value})
        except (TypeError, policies.PolicyError):
            continue
        kept[name] = value
    return kept


def stops(run: Callable[..., Any], folder: Path) -> bool:
    """Whether a stop file that is there ends the program."""
    file = folder / "stop"
    file.touch()
    try:
        run(stop_file=file)
    except EndRequested:
        return True
    except (TypeError, policies.PolicyError):
        pass
    return False


# -- the entry points: each yields the features that it has shown ----------------------------------


def healer_torch(folder: Path) -> Iterator[str]:
    recorder, memory = Recorder(), OutOfMemory(8)

    def run(**options: Any) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        numbers = [torch.full((16, 4), float(i % 7)) for i in range(STEPS)]
        numbers[NAN] *= torch.nan

        class Unreadable(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return STEPS

            def __getitem__(self, index: int) -> Any:
                if index == UNREADABLE:
                    raise OSError("this row is no image")
                return numbers[index]

        model.register_forward_pre_hook(memory)
        state = {"model": model, "optimizer": optimizer}
        loader = torch.utils.data.DataLoader(Unreadable(), batch_size=None)
        with Healer(
            POLICY, state=state, store=folder / "store", **grouped(options, save_every=5)
        ) as healer:
            for batch in healer.batches(loader):
                for part in healer.microbatches(batch):
                    with part:
                        loss = model(part.batch).square().mean()
                        healer.observe(loss)
                        (loss * part.weight).backward()
                optimizer.step()
                optimizer.zero_grad()
        return healer

    if stops(run, folder):
        yield "stop_file"
    report = run(**recorder.options()).report()
    yield from recorder.seen
    if report.counts["shrinks"] and memory.split:
        yield "out of memory: smaller micro-batches"
    if report.counts["skips"]:
        yield "clip, skip, learning rate cut"
    yield "report()"


def healer_jax(folder: Path) -> Iterator[str]:
    recorder = Recorder()

    def run(**options: Any) -> Any:
        loop = JaxLoop(Faults(always=[NAN]), POLICY)
        read: Any = list(range(STEPS))

        class Unreadable(list):
            def __getitem__(self, index: Any) -> Any:
                if index == UNREADABLE:
                    raise OSError("this row is no image")
                return super().__getitem__(index)

        with Healer(
            POLICY,
            state=loop.state,
            store=folder / "store",
            **grouped(options, save_every=5),
        ) as healer:
            for number in healer.batches(Unreadable(read)):
                for part in healer.microbatches(np.full(16, number)):
                    with part:
                        if number == TOO_LARGE and len(part.batch) > 8:
                            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 1 GB")
                loop.step(healer, number)
        return healer

    if stops(run, folder):
        yield "stop_file"
    report = run(**recorder.options()).report()
    yield from recorder.seen
    if report.counts["shrinks"]:
        yield "out of memory: smaller micro-batches"
    if report.counts["skips"]:
        yield "clip, skip, learning rate cut"
    yield "report()"


def heal_trainer(folder: Path) -> Iterator[str]:
    recorder, memory = Recorder(), OutOfMemory(2)

    def run(**options: Any) -> Any:
        trainer = small_runs.trainer(folder, steps=STEPS, scaled={NAN: float("nan")})
        trainer.train_dataset = Rows(trainer.train_dataset)
        trainer.model.layers.register_forward_pre_hook(memory)
        healed = healcore.torch.heal_trainer(
            trainer,
            POLICY,
            store=folder / "store",
            **grouped(options, save_every=5),
        )
        healed.train()
        return healed

    if stops(run, folder):
        yield "stop_file"
    healed = run(**recorder.options())
    yield from recorder.seen
    report = healed.report()
    if report.counts["shrinks"] and memory.split:
        yield "out of memory: smaller micro-batches"
    if report.counts["skips"]:
        yield "clip, skip, learning rate cut"
    yield "report()"
    memory.rows = 10**9
    healed.trainer.train_dataset = small_runs.Rows(STEPS)
    if len(healed.dry_run(2).losses) == 2:
        yield "dry run"


def lightning_callback(folder: Path) -> Iterator[str]:
    recorder, memory = Recorder(), OutOfMemory(2)

    def run(memory: Any = None, **options: Any) -> Any:
        torch.manual_seed(0)
        module = fits.Regression()
        if memory is not None:
            module.net.register_forward_pre_hook(memory)
        options = {"store": folder / "store", "save_every": 5, **options}
        callback = LightningHealingCallback(POLICY, **grouped(options))
        rows = fits.data(STEPS, small_runs.BATCH, bad=NAN)
        loader = torch.utils.data.DataLoader(Rows(rows), batch_size=small_runs.BATCH)
        fits.trainer(callback, max_epochs=1).fit(module, loader)
        return callback

    if stops(run, folder):
        yield "stop_file"
    callback = run(**recorder.options())
    yield from recorder.seen
    if callback.healer.report().counts["skips"]:
        yield "clip, skip, learning rate cut"
    yield "report()"
    with suppress(torch.OutOfMemoryError):
        run(memory, store=None)
        yield "out of memory: smaller micro-batches"


def huggingface_callback(folder: Path) -> Iterator[str]:
    recorder = Recorder()

    def run(rows: Any = None, **options: Any) -> HealingCallback:
        callback = HealingCallback(POLICY, **options)
        trainer = small_runs.trainer(
            folder, steps=STEPS, scaled={NAN: float("nan")}, callbacks=[callback]
        )
        if rows is not None:
            trainer.train_dataset = rows(trainer.train_dataset)
        trainer.train()
        return callback

    if stops(run, folder):
        yield "stop_file"
    callback = run(**taken(HealingCallback, recorder.options()))
    yield from recorder.seen
    assert callback.healing is not None
    if callback.healing.metrics()["heal/skips"]:
        yield "clip, skip, learning rate cut"
    with suppress(OSError):
        run(Rows)
        yield "skip_batch for unreadable data"


def in_step(folder: Path) -> Iterator[str]:
    recorder = Recorder()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {**recorder.options(), "stop_file": folder / "stop"}
    yield from taken(lambda **o: healcore.torch.attach(optimizer, POLICY, **o).detach(), options)
    heal = healcore.torch.attach(optimizer, POLICY)
    loss = model(torch.full((2, 4), torch.nan)).mean()
    heal.observe(loss)
    loss.backward()
    optimizer.step()
    if model.weight.isfinite().all():
        yield "clip, skip, learning rate cut"
    assert not hasattr(heal.report(), "history")
    # optax's `protect` takes no more than `attach` does.
    yield from taken(lambda **o: healcore.jax.protect(optax.sgd(0.1), POLICY, **o), options)


ENTRY_POINTS: dict[str, list[Callable[[Path], Iterator[str]]]] = {
    "Healer": [healer_torch, healer_jax],
    "heal_trainer(trainer)": [heal_trainer],
    "LightningHealingCallback": [lightning_callback],
    "HealingCallback": [huggingface_callback],
    "attach, protect": [in_step],
}


def test_the_table_has_these_entry_points():
    assert all(list(row) == list(ENTRY_POINTS) for row in table().values())


@pytest.mark.parametrize(
    ("name", "run"), [(name, run) for name, runs in ENTRY_POINTS.items() for run in runs]
)
def test_the_table_is_true(name: str, run: Any, tmp_path: Path):
    shown = {*run(tmp_path)} | found_in(tmp_path)
    assert shown == {feature for feature, row in table().items() if row[name]}


def test_the_options_have_the_same_names_everywhere():
    hooks = inspect.signature(healcore.Hooks).parameters
    options = [feature for feature in table() if feature.isidentifier()]
    assert len(options) == 5
    for entry in (Healer, healcore.torch.heal_trainer):
        assert set(options) <= {*inspect.signature(entry).parameters, *hooks}
