"""Replays of recorded training runs."""

from __future__ import annotations

import json

import pytest

from healcore.core.verdict import Action
from healcore.tools.replay import replay
from tests.parity.recorded_runs import FOLDER, needed
from tests.tools.replay import logs


def labelled(family: str, *, spikes: bool):
    """The first run of a family, by its label."""
    known = json.loads((FOLDER / "labels.json").read_text())
    return next(
        each for each in known if each["file"].startswith(family) and bool(each["spikes"]) == spikes
    )


@needed
def test_spikes_of_recorded_runs_are_found():
    """The label of the Llama run's spike was set by eye."""
    for family in ("mlperf_v5.1/llama31_8b__Cisco", "algoperf/spiky"):
        label = labelled(family, spikes=True)
        result = replay(logs.trace(FOLDER / label["file"]), "pretraining")
        orders = [row.index for row in result if Action.ROLLBACK in row.action]
        for spike in label["spikes"]:
            assert any(spike["onset"] <= order <= spike["onset"] + 10 for order in orders), family


@needed
@pytest.mark.parametrize("policy", ["default", "pretraining"])
def test_runs_without_a_spike_have_no_rollback(policy):
    for family in ("algoperf/calm", "algoperf/hard", "megatron"):
        label = labelled(family, spikes=False)
        assert replay(logs.trace(FOLDER / label["file"]), policy).summary.rollbacks == 0
