"""The probe's results on the public runs, with its defaults."""

import math
from collections import Counter

import pytest

from tests.parity.recorded_runs import FOLDER, needed
from tests.tools.probe.curves import probe

pytestmark = needed


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
def test_verdicts_of_recorded_runs(every, pattern, number, verdict):
    paths = sorted(FOLDER.glob(pattern))[::every]
    found = Counter(probe(path).verdict.value for path in paths)
    assert found == {verdict: math.ceil(number / every)}
