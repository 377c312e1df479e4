"""The originals' rules in plain Python from their sources, faults included: an oracle.

llm-foundry's needs Composer, with GPUs' worth of dependencies, the others a Trainer that trains.
Step numbers are as Composer's and the Trainer's.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np


def kill_loss_spike(losses: np.ndarray) -> np.ndarray:
    """llm-foundry 8c8dd48: where a loss is an outlier, a spike and high losses are called.

    Window and cap are as they are by default. Composer counts a batch before it calls `batch_end`.
    So when the window is full, after 100 batches, the batch is number 101, and the cap to be taken
    "at step window_size" never is.
    """
    window: deque[float] = deque(maxlen=100)
    outliers = 0
    cap = 10.0
    rows = []
    for batch, loss in enumerate(losses.tolist(), 1):
        outlier = spike = high = False
        if len(window) == 100:
            outlier = loss >= float(np.mean(window)) * 2.0
            outliers = outliers + 1 if outlier else 0
            spike = outliers > 4
            if not spike and batch >= 200:
                high = sum(each > cap for each in window) >= 50
        window.append(loss)
        rows.append((outlier, spike, high))
    return np.array(rows).T


def loss_watchdog(losses: Sequence[float], threshold: float) -> np.ndarray:
    """Axolotl 067b021: where three logged losses in a row, each of the step before, are high."""
    violations = 0
    asked = [False]  # at the first step nothing is logged
    for logged in losses[:-1]:
        violations = violations + 1 if logged > threshold else 0
        asked.append(violations >= 3)
    return np.array(asked)


def self_healing(
    losses: np.ndarray, norms: np.ndarray, *, nan_patience: int = 3, loss_spike_factor: float = 5.0
) -> list[set[str]]:
    """All failures that the self-healing callback for TRL could report at each logged step."""
    window: deque[float] = deque(maxlen=100)
    nan = 0
    rises = 0
    steps = []
    for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
        nan = 0 if np.isfinite(loss) else nan + 1
        if nan:
            steps.append({"nan_loss"} if nan >= nan_patience else set())
            continue
        rises = rises + 1 if window and loss > window[-1] else 0
        full = len(window) == 100
        found = {
            "loss_spike": full and loss > loss_spike_factor * float(np.mean(window)),
            "divergence": rises >= 50,
            "grad_explosion": norm > 100.0,
            "grad_vanishing": norm < 1e-7,
        }
        window.append(loss)
        steps.append({name for name, there in found.items() if there})
    return steps
