"""Rules that are on no package index, in plain Python from the formulas of their sources.

Written from the formula, not copied; each names project, file and commit. They are as broken as
the originals: a test asks them for what the port does otherwise.
"""

from __future__ import annotations

import math

import numpy as np


def _moments(values: list[float], *, ddof: int) -> tuple[float, float]:
    """Mean and standard deviation; NaN as NumPy has it."""
    array = np.array(values)
    spread = ((array - array.mean()) ** 2).sum() / max(1, len(array) - ddof)
    return float(array.mean()), math.sqrt(spread) if spread >= 0 else math.nan


def levanter(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """`SkipStepConfig.wrap` (Levanter 9263f81, src/levanter/optim/skipstep.py): steps skipped."""
    skipped: list[bool] = []
    held: list[tuple[float, float]] = []
    for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
        skip = False
        if len(held) >= 64:
            fine = True
            for value, window in zip((loss, norm), zip(*held, strict=True), strict=True):
                mean, std = _moments(list(window), ddof=0)
                fine = fine and value <= mean + 6 * max(std, 1e-6)
            skip = not fine
        skipped.append(skip)
        held = [*held, (loss, norm)][-128:]
    return np.array(skipped)


def maxtext(losses: np.ndarray, norms: np.ndarray, *, clip: float | None = None) -> np.ndarray:
    """`skip_step_on_spikes` (MaxText e591f30, src/maxtext/optimizers/optimizers.py).

    Args:
        losses: (steps,).
        norms: (steps,), before clipping.
        clip: `gradient_clipping_threshold`: the rule is given the norm after it.
    """
    skipped: list[bool] = []
    held: list[tuple[float, float]] = []
    for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
        norm = norm if clip is None else min(norm, clip)
        skip = False
        if len(held) + 1 >= 64:
            fine = True
            for value, window in zip((loss, norm), zip(*held, strict=True), strict=True):
                mean, std = _moments(list(window), ddof=1)
                fine = fine and value - mean <= 6 * std
            skip = not fine
        skipped.append(skip)
        held = [*held, (loss, norm)][-128:]
    return np.array(skipped)


def axlearn(
    norms: np.ndarray,
    *,
    ratio: float | None = 20.0,
    sigmas: float | None = None,
    min_count: int = 500,
    decay: float = 0.99,
) -> np.ndarray:
    """`skip_and_clip_by_global_norm` (AXLearn 34aed43, axlearn/common/optimizers.py).

    Args:
        norms: (steps,).
        ratio: smallest multiplier of `drop_norm_by_grad_norm_ema`, or None.
        sigmas: smallest multiplier of `drop_norm_by_grad_norm_stddev`, or None.
        min_count: steps before which the latter drops nothing.
        decay: `grad_norm_ema_decay`.
    """
    mean, square, count, dropped = 1.0, 1.0, 0, []
    for norm in norms.tolist():
        valid = math.isfinite(norm)
        if ratio is not None:
            valid = valid and norm < ratio * mean
        if sigmas is not None:
            var = square - mean**2
            std = math.sqrt(var) if var >= 0 else math.nan
            valid = valid and norm < (1e10 if count < min_count else mean + sigmas * std)
        dropped.append(not valid)
        if valid:
            # Adafactor, section 7.1: the decay of a bias-corrected average.
            now = decay * (1 - decay**count) / (1 - decay ** (count + 1))
            mean = now * mean + (1 - now) * norm
            square = now * square + (1 - now) * norm**2
            count += 1
    return np.array(dropped)


def megatron_skips(norms: np.ndarray, threshold: float) -> np.ndarray:
    """`grad_norm_skip_threshold` (Megatron-LM d98e8a6, megatron/core/optimizer/optimizer.py)."""
    finite = math.isfinite(threshold)
    return np.array([finite and norm > threshold for norm in norms.tolist()])


def megatron_spiky(losses: np.ndarray) -> np.ndarray:
    """`is_unexpectedly_large` (megatron/core/rerun_state_machine.py): 10 times the first 100."""
    top, count, large = 0.0, 0, []
    for loss in losses.tolist():
        value = abs(loss)
        if not math.isfinite(value):
            large.append(False)
        elif count < 100:
            top, count = max(top, value), count + 1
            large.append(False)
        else:
            large.append(value >= 10 * top)
    return np.array(large)
