"""The same lines from every backend on recorded training runs."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from healcore.tools.replay import replay
from tests.tools.replay import logs
from tests.tools.replay.test_backends import check

FOLDER = Path(__file__).parents[4] / "shared" / "traces"

needed = pytest.mark.skipif(
    not (FOLDER / "labels.json").is_file(), reason=f"no recorded runs: {FOLDER} is not there"
)


def labelled(family: str, *, spikes: bool):
    """The first run of a family, by its label."""
    known = json.loads((FOLDER / "labels.json").read_text())
    return next(
        each for each in known if each["file"].startswith(family) and bool(each["spikes"]) == spikes
    )


@needed
@pytest.mark.parametrize(
    ("family", "spikes"),
    [("mlperf_v5.1/llama31_8b__Cisco", True), ("algoperf/spiky", True), ("algoperf/early", False)],
)
def test_a_window_in_every_backend(tmp_path, family, spikes):
    """Some 200 rows before the first event and 60 after it, and torch too."""
    label = labelled(family, spikes=spikes)
    onset = label["spikes"][0]["onset"] if spikes else 40
    with (FOLDER / label["file"]).open() as file:
        rows = list(csv.DictReader(file))[max(0, onset - 200) : onset + 30]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "step"}
    path = logs.write(tmp_path / "a.csv", columns, [float(row["step"]) for row in rows])
    output = check(logs.trace(path), "pretraining")
    assert '"ROLLBACK"' in "".join(output)


@needed
def test_whole_runs_in_numpy_and_jax():
    """The label of the Llama run's spike was set by eye."""
    for family in ("mlperf_v5.1/llama31_8b__Cisco", "algoperf/spiky"):
        label = labelled(family, spikes=True)
        rows = [
            json.loads(line)
            for line in check(logs.trace(FOLDER / label["file"]), "pretraining", ("jax",))
        ]
        orders = [row["index"] for row in rows[:-1] if "ROLLBACK" in row["action"]]
        for spike in label["spikes"]:
            assert any(spike["onset"] <= order <= spike["onset"] + 10 for order in orders), family


@needed
@pytest.mark.parametrize("policy", ["default", "pretraining"])
def test_runs_without_a_spike_have_no_rollback(policy):
    for family in ("algoperf/calm", "algoperf/hard", "megatron"):
        label = labelled(family, spikes=False)
        assert replay(logs.trace(FOLDER / label["file"]), policy).finish().rollbacks == 0
