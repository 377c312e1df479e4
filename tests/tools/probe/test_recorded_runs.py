"""The probe's results on the public runs, with its defaults."""

from __future__ import annotations

import fnmatch
import functools
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from healcore.tools.probe.checks import ProbeResult
from tests.tools.probe.curves import probe

FOLDER = Path(__file__).parents[4] / "shared" / "traces"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=f"{FOLDER} is not there")


@functools.cache
def probed(path: Path) -> ProbeResult:
    return probe(path)


@pytest.mark.parametrize(
    ("pattern", "number", "verdict"),
    [
        ("algoperf/calm/*.csv", 47, "PASS"),
        ("algoperf/hard_negative_vit/*.csv", 16, "PASS"),
        ("modded_nanogpt/*/*.csv", 14, "PASS"),
        ("megatron_golden/*.csv", 12, "PASS"),
        ("mlperf_v5.1/flux1*.csv", 6, "PASS"),
        ("mlperf_v5.1/llama31_405b*.csv", 2, "PASS"),
        ("algoperf/early_nan_100/*.csv", 12, "FAIL"),
        ("mlperf_v5.1/llama31_8b*.csv", 10, "WARN"),
    ],
)
@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.stress)])
def test_verdict(every, pattern, number, verdict):
    paths = sorted(FOLDER.glob(pattern))[::every]
    found = Counter(probed(path).verdict.value for path in paths)
    assert found == {verdict: math.ceil(number / every)}


def labelled(pattern: str) -> tuple[int, int, int]:
    """Labelled spikes, those that an event touches, and events that touch no label."""
    spikes = found = elsewhere = 0
    for each in json.loads((FOLDER / "labels.json").read_text()):
        if not fnmatch.fnmatch(each["file"], pattern):
            continue
        steps = np.loadtxt(FOLDER / each["file"], delimiter=",", skiprows=1, usecols=0)
        reported = [
            (np.searchsorted(steps, event.step), np.searchsorted(steps, event.last))
            for event in probed(FOLDER / each["file"]).facts["events"]
        ]

        def touches(span: tuple[int, int], label: dict[str, int]) -> bool:
            return span[0] <= label["end"] + 5 and label["onset"] - 5 <= span[1]

        known = each["spikes"] + each["ambiguous"]
        spikes += len(each["spikes"])
        found += sum(any(touches(span, spike) for span in reported) for spike in each["spikes"])
        elsewhere += sum(not any(touches(span, label) for label in known) for span in reported)
    return spikes, found, elsewhere


@pytest.mark.parametrize(
    ("pattern", "spikes", "least", "most_elsewhere"),
    [("mlperf_v5.1/llama31_8b*", 15, 15, 0), ("algoperf/spiky/*", 67, 67, 10)],
)
def test_the_spikes_are_where_people_saw_them(pattern, spikes, least, most_elsewhere):
    there, found, elsewhere = labelled(pattern)
    assert there == spikes
    assert found >= least
    assert elsewhere <= most_elsewhere
