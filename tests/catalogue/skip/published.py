"""Rules that are on no package index, in plain Python from the formulas of their sources.

Written from the formula, not copied; each names project, file and commit. They are as broken as
the originals: a test asks them for what the port does otherwise.
"""

import math

import numpy as np


def _outliers(losses: np.ndarray, norms: np.ndarray, first: int, *, ddof: int) -> np.ndarray:
    """Steps, from number `first` on, with a value above mean + 6 deviations of the 128 before."""
    skipped = []
    held = np.empty((0, 2))
    for row in np.stack([losses, norms], axis=1).astype(float):
        skip = False
        if len(held) >= first:
            spread = ((held - held.mean(0)) ** 2).sum(0) / max(1, len(held) - ddof)
            deviation = np.maximum(np.sqrt(spread), 0 if ddof else 1e-6)
            skip = not (row - held.mean(0) <= 6 * deviation).all()
        skipped.append(skip)
        held = np.concatenate([held, row[None]])[-128:]
    return np.array(skipped)


def levanter(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """`SkipStepConfig.wrap` (Levanter 9263f81, src/levanter/optim/skipstep.py): steps skipped."""
    return _outliers(losses, norms, 64, ddof=0)


def maxtext(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """`skip_step_on_spikes` (MaxText e591f30, src/maxtext/optimizers/optimizers.py)."""
    return _outliers(losses, norms, 63, ddof=1)


def axlearn(norms: np.ndarray, *, ratio: float = 20.0, decay: float = 0.99) -> np.ndarray:
    """`skip_and_clip_by_global_norm` (AXLearn 34aed43, axlearn/common/optimizers.py).

    `ratio` is the smallest multiplier of `drop_norm_by_grad_norm_ema`.
    """
    mean = 1.0
    count = 0
    dropped = []
    for norm in norms.tolist():
        valid = math.isfinite(norm) and norm < ratio * mean
        dropped.append(not valid)
        if valid:
            # Adafactor, section 7.1: the decay of a bias-corrected average.
            now = decay * (1 - decay**count) / (1 - decay ** (count + 1))
            mean = now * mean + (1 - now) * norm
            count += 1
    return np.array(dropped)


def megatron_skips(norms: np.ndarray, threshold: float) -> np.ndarray:
    """`grad_norm_skip_threshold` (Megatron-LM d98e8a6, megatron/core/optimizer/optimizer.py)."""
    finite = math.isfinite(threshold)
    return np.array([finite and norm > threshold for norm in norms.tolist()])


def megatron_spiky(losses: np.ndarray) -> np.ndarray:
    """`is_unexpectedly_large` (megatron/core/rerun_state_machine.py): 10 times the first 100."""
    top = 0.0
    count = 0
    large = []
    for loss in losses.tolist():
        value = abs(loss)
        if not math.isfinite(value):
            large.append(False)
        elif count < 100:
            top = max(top, value)
            count += 1
            large.append(False)
        else:
            large.append(value >= 10 * top)
    return np.array(large)
