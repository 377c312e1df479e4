"""Bytes of good files changed at random: each reader raises its own errors, and no others."""

import contextlib
import json
import os
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
from healcore.tools.probe import checkpoint, optimizer
from healcore.tools.probe.checks import CheckpointInputs, OptimizerInputs, run_probe
from healcore.tools.traces import open_traces
from tests.hostile.pickles import dcp, packed
from tests.hostile.test_logs import EVENT, ROWS, tensorboard

pytestmark = pytest.mark.slow  # many random cases; the other tests here have examples

STATE = {"w": torch.ones(4), "n": [1, 2.5, "x", None, {"a": True}], "b": torch.zeros(2, 2)}


def _traced(path: Path) -> None:
    open_traces([os.fspath(path)])


def _checkpoint(path: Path) -> None:
    run_probe("checkpoint", str(path), checkpoint.probe_checkpoint, path, CheckpointInputs())
    run_probe("optimizer", str(path), optimizer.probe_optimizer, path, OptimizerInputs())


def _reads(read: Callable[[Path], object], error: type[Exception]) -> Callable[[Path], None]:
    """A reader whose own errors are expected."""

    def reading(path: Path) -> None:
        with contextlib.suppress(error):
            read(path)

    return reading


def index_of_dcp() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return (dcp(Path(folder) / "saved", **STATE) / ".metadata").read_bytes()


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
    "DCP": (index_of_dcp(), ".metadata", lambda path: _checkpoint(path.parent)),
    "CSV": (ROWS.encode(), "log.csv", _traced),
    "JSON Lines": (LINES.encode(), "log.jsonl", _traced),
    "Trainer": (DOCUMENT.encode(), "log.json", _traced),
    "TensorBoard": (tensorboard(9), "log", _traced),
    "events": (EVENT * 3, "events", log.read),
    "policy": (dumps(load("default")).encode(), "p.toml", _reads(load, PolicyError)),
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
def test_a_file_with_changed_bytes_is_read_or_refused(name, examples):
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
