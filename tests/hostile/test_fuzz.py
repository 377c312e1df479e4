"""Bytes of good files changed at random: each reader raises its own errors, and no others."""

import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from healcore.events import log
from healcore.policy import PolicyError, dumps, load
from healcore.runtime.store import StoreError
from healcore.runtime.store.manifest import MANIFEST
from healcore.tools.probe import checkpoint, optimizer
from healcore.tools.probe.checks import CheckpointInputs, OptimizerInputs, judged
from healcore.tools.traces import open_traces
from healcore.torch.store import DCPStore
from tests.hostile.pickles import packed
from tests.hostile.run_directories import sealed_again
from tests.hostile.test_logs import EVENT, ROWS, tensorboard

STATE_TO_SAVE = {"model": torch.ones(4), "other": torch.zeros(4)}
STATE = {"w": torch.ones(4), "n": [1, 2.5, "x", None, {"a": True}], "b": torch.zeros(2, 2)}


def _traced(path: Path) -> None:
    open_traces([os.fspath(path)])


def _checkpoint(path: Path) -> None:
    judged("checkpoint", str(path), checkpoint.judge, path, CheckpointInputs())
    judged("optimizer", str(path), optimizer.judge, path, OptimizerInputs())


def _reads(read: Callable[[Path], object], error: type[Exception]) -> Callable[[Path], None]:
    """A reader whose own errors are expected."""

    def reading(path: Path) -> None:
        with contextlib.suppress(error):
            read(path)

    return reading


STORE = tempfile.TemporaryDirectory(prefix="store-")
"""A store with one checkpoint, of step 1. Never changed: examples copy it."""
_saving = DCPStore(Path(STORE.name))
_saving.save(1, STATE_TO_SAVE)
_saving.wait()
(SAVED,) = Path(STORE.name).glob("step-*")


def _restored(name: str, path: Path) -> None:
    """Restores and probes a checkpoint of which one file is this, with digests that hold."""
    root = shutil.copytree(STORE.name, path.parent / "store")
    (folder,) = root.glob("step-*")
    shutil.copy(path, folder / name)
    if name != MANIFEST:
        sealed_again(folder)
    with contextlib.suppress(StoreError):
        DCPStore(root).restore(1, {name: torch.zeros(4) for name in STATE_TO_SAVE})
    _checkpoint(root)


LINES = "".join(json.dumps({"step": at, "loss": 1 / (at + 1)}) + "\n" for at in range(9))
DOCUMENT = json.dumps({"log_history": [json.loads(line) for line in LINES.splitlines()]})

READERS: dict[str, tuple[bytes, str, Callable[[Path], object]]] = {
    "torch": (packed(STATE), "c.pt", _checkpoint),
    "old torch": (packed(STATE, _use_new_zipfile_serialization=False), "c.pt", _checkpoint),
    "safetensors": (
        safetensors.torch.save({"w": torch.zeros(2)}, {"a": "b"}),
        "c.safetensors",
        _checkpoint,
    ),
    "DCP": (
        (SAVED / "data" / ".metadata").read_bytes(),
        ".metadata",
        lambda path: _checkpoint(path.parent),
    ),
    "CSV": (ROWS.encode(), "log.csv", _traced),
    "JSON Lines": (LINES.encode(), "log.jsonl", _traced),
    "Trainer": (DOCUMENT.encode(), "log.json", _traced),
    "TensorBoard": (tensorboard(9), "log", _traced),
    "events": (EVENT * 3, "events", log.read),
    "policy": (dumps(load("default")).encode(), "p.toml", _reads(load, PolicyError)),
    **{
        name: ((SAVED / name).read_bytes(), "file", functools.partial(_restored, name))
        for name in ("state.json", "manifest.json", "data/.metadata")
    },
}
"""Format -> content, name of the file, and its reader with its own errors suppressed."""


@st.composite
def changes(draw: st.DrawFn) -> list[tuple[float, str, bytes]]:
    """Changes to a file: place (as a fraction of it), kind, and new value."""
    place = st.floats(0, 1, exclude_max=True)
    how = st.sampled_from(("set", "insert", "cut", "repeat"))
    tokens = st.sampled_from(
        (b"\xff" * 8, b"[", b"{", b'"', b"9" * 400, b"1e999", b".", b"r", b"\0")
    )
    return draw(st.lists(st.tuples(place, how, tokens | st.binary(max_size=9)), max_size=5))


def changed(content: bytes, asked: list[tuple[float, str, bytes]]) -> bytes:
    """The content with these changes."""
    for part, how, new in asked:
        at = int(part * (len(content) + 1))
        put = {"set": new, "insert": new, "cut": b"", "repeat": content[at : at + 40] * 2}[how]
        kept = content[at + len(new) :] if how in ("set", "cut") else content[at:]
        content = content[:at] + put + kept
    return content


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("examples", [100, pytest.param(20_000, marks=pytest.mark.stress)])
@pytest.mark.parametrize("name", READERS)
def test_changed_bytes(name, examples):
    content, file, use = READERS[name]

    @settings(
        max_examples=examples, deadline=None, database=None, derandomize=True,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
    )  # fmt: skip
    @given(changes())
    def holds(asked):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / file
            path.write_bytes(changed(content, asked))
            use(path)

    holds()
