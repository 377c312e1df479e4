"""The public runs: what the probe says of them, with its defaults."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.probe.curves import probe

FOLDER = Path(__file__).parents[3] / "shared" / "traces"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is not there")


def verdicts(pattern: str) -> Counter[str]:
    paths = sorted(FOLDER.glob(pattern))
    assert paths
    return Counter(probe(path).verdict.value for path in paths)


@pytest.mark.parametrize(
    ("pattern", "number"),
    [
        ("algoperf/calm/*.csv", 47),
        ("algoperf/hard_negative_vit/*.csv", 16),
        ("modded_nanogpt/*/*.csv", 14),
        ("megatron_golden/*.csv", 12),
        ("mlperf_v5.1/flux1*.csv", 6),
        ("mlperf_v5.1/llama31_405b*.csv", 2),
    ],
)
def test_healthy_runs_pass(pattern, number):
    assert verdicts(pattern) == {"PASS": number}


def test_runs_that_end_in_nan_fail():
    assert verdicts("algoperf/early_nan_100/*.csv") == {"FAIL": 12}


def test_runs_with_spikes_that_lasted_warn():
    assert verdicts("mlperf_v5.1/llama31_8b*.csv") == {"WARN": 10}


def test_the_spikes_are_where_people_saw_them():
    labels = json.loads((FOLDER / "labels.json").read_text())
    of_llama = [each for each in labels if "llama31_8b" in each["file"]]
    found = 0
    for each in of_llama:
        steps = np.loadtxt(FOLDER / each["file"], delimiter=",", skiprows=1, usecols=0)
        spans = [(steps[s["onset"]], steps[s["end"]]) for s in each["spikes"] + each["ambiguous"]]
        margin = 64 * (steps[1] - steps[0])
        for event in probe(FOLDER / each["file"]).facts["events"]:
            assert any(a - margin <= event.step <= b + margin for a, b in spans), (
                each["file"],
                event,
            )
            found += 1
    assert found >= len(of_llama)
