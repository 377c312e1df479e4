"""Published spike rules, each in a few plain lines: what healcore's detectors are measured against.

Written from the formulas, with the published defaults. Every rule sees a value, answers yes or no,
and then learns it. Two kindnesses, so that a comparison is about spikes: a non-finite value is an
alarm and is never learnt (in OLMo it stays in the window and 129 steps are skipped; ZClip's mean is
NaN for ever after), and a rule that would stop the run goes on along the recorded curve.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

Rule = Callable[[Iterable[float]], list[bool]]


def _rolling(
    values: Iterable[float], window: int, at_least: int, is_outlier: Callable[[float, deque], bool]
) -> list[bool]:
    """A rule on the last `window` finite values, once there are `at_least` of them."""
    seen: deque[float] = deque(maxlen=window)
    alarms = []
    for value in values:
        if not math.isfinite(value):
            alarms.append(True)
            continue
        alarms.append(len(seen) >= at_least and is_outlier(value, seen))
        seen.append(value)
    return alarms


def _sigmas(values: Iterable[float], window: int, at_least: int, sigmas: float) -> list[bool]:
    def far(value: float, seen: deque) -> bool:
        array = np.asarray(seen)
        return value - array.mean() > sigmas * array.std(ddof=1)

    return _rolling(values, window, at_least, far)


def olmo_skip_step(values: Iterable[float]) -> list[bool]:
    """OLMo-core's SkipStepOptimizer: 6 standard deviations above the mean of the last 128."""
    return _sigmas(values, window=128, at_least=64, sigmas=6.0)


def olmo_spike_score(values: Iterable[float]) -> list[bool]:
    """OLMo 2 (arXiv:2501.00656): 7 standard deviations above the mean of the last 1,000."""
    return _sigmas(values, window=1000, at_least=128, sigmas=7.0)


def lightning(losses: Iterable[float]) -> list[bool]:
    """Lightning's SpikeDetection: a loss off the mean of the last 10 by twice that mean."""

    def off(loss: float, seen: deque) -> bool:
        mean = math.fsum(seen) / len(seen)
        return abs(loss - mean) >= 2.0 * abs(mean)

    return _rolling(losses, 10, 10, off)


def five_medians(losses: Iterable[float]) -> list[bool]:
    """The rule of thumb: 5 times the median of the last 100."""
    return _rolling(losses, 100, 20, lambda loss, seen: loss > 5 * statistics.median(seen))


def megatron(losses: Iterable[float]) -> list[bool]:
    """Megatron-LM's result check: 10 times the largest of the first 100 losses."""
    largest, alarms = -math.inf, []
    for row, loss in enumerate(losses):
        if not math.isfinite(loss):
            alarms.append(True)
            continue
        alarms.append(row >= 100 and loss >= 10 * largest)
        if row < 100:
            largest = max(largest, loss)
    return alarms


def kill_loss_spike(losses: Iterable[float], *, cap: float = 10.0) -> list[bool]:
    """llm-foundry's KillLossSpike: the fifth loss in a row of twice the mean of the last 100.

    Or half of the window above `cap`, from 200 steps on.
    """
    seen: deque[float] = deque(maxlen=100)
    alarms, outliers = [], 0
    for row, loss in enumerate(losses):
        if not math.isfinite(loss):
            alarms.append(True)
            continue
        full = len(seen) == 100
        is_outlier = full and loss >= 2 * math.fsum(seen) / 100
        outliers = outliers + 1 if is_outlier else 0
        high = full and row >= 200 and sum(each > cap for each in seen) >= 50
        alarms.append(outliers > 4 or high)
        seen.append(loss)
    return alarms


def zclip_z(norms: Iterable[float]) -> list[bool]:
    """ZClip (arXiv:2504.02507): a norm more than 2.5 deviations above its moving average.

    What is clipped enters the averages as clipped ("reciprocal"), with decay 0.97 after a warm-up
    of 25 steps.
    """
    first: list[float] = []
    mean = variance = 0.0
    alarms = []
    for norm in norms:
        if not math.isfinite(norm):
            alarms.append(True)
            continue
        if len(first) < 25:
            first.append(norm)
            mean, variance = statistics.fmean(first), statistics.pvariance(first)
            alarms.append(False)
            continue
        sigma = math.sqrt(variance)
        z = (norm - mean) / (sigma + 1e-6)
        alarms.append(z > 2.5)
        learnt = mean + 2.5**2 * sigma / z if z > 2.5 else norm
        mean = 0.97 * mean + 0.03 * learnt
        variance = 0.97 * variance + 0.03 * (learnt - mean) ** 2
    return alarms


def either(a: list[bool], b: list[bool]) -> list[bool]:
    """Alarms where one of two rules does."""
    return [x or y for x, y in zip(a, b, strict=True)]


ON_LOSS: dict[str, Rule] = {
    "OLMo skip-step, 6 sigma / 128": olmo_skip_step,
    "OLMo 2 spike score, 7 sigma / 1000": olmo_spike_score,
    "Lightning SpikeDetection, 3x the mean of 10": lightning,
    "5x the median of 100": five_medians,
    "Megatron, 10x the largest of the first 100": megatron,
    "llm-foundry KillLossSpike, 2x the mean of 100": kill_loss_spike,
}
"""Rules on the loss, by the name in the table."""

ON_NORM: dict[str, Rule] = {
    "ZClip z > 2.5, on norms": zclip_z,
    "OLMo skip-step, on norms": olmo_skip_step,
}
"""Rules on the gradient norm: where a run has none they do not apply."""
