"""The originals' rules in plain Python from their sources: an oracle where none can be run.

`KillLossSpike` is llm-foundry's callback without Composer (which it needs, with GPUs' worth of
dependencies); `LossWatchDog` is Axolotl's, on transformers' own callback classes. Written from the
rules, faults included; step numbers as Composer's and the Trainer's are. `SelfHealing` is the
self-healing callback for the Trainer and TRL, from its `HealingConfig` and rules.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class KillLossSpike:
    """llm-foundry 8c8dd48, window and cap as they are by default.

    Composer counts a batch before it calls `batch_end`. So when the window is full, after 100
    batches, the batch is number 101, and the cap to be taken "at step window_size" never is.
    """

    size, multiplier, patience = 100, 2.0, 4

    def __init__(self) -> None:
        self.window: deque[float] = deque(maxlen=self.size)
        self.cap = 10.0
        self.outliers = self.batch = 0

    def see(self, loss: float) -> tuple[bool, bool, bool]:
        """(this loss is an outlier, a spike is called, high losses are called)."""
        self.batch += 1
        outlier = spike = high = False
        if len(self.window) == self.size:
            if self.batch == self.size:
                self.cap = min(max(self.window), self.cap)
            outlier = loss >= float(np.mean(self.window)) * self.multiplier
            self.outliers = self.outliers + 1 if outlier else 0
            spike = self.outliers > self.patience
            if not spike and self.batch >= 2 * self.size:
                high = sum(each > self.cap for each in self.window) >= self.size / 2
        self.window.append(loss)
        return outlier, spike, high


class LossWatchDog(TrainerCallback):
    """Axolotl 067b021: the last log entry against a threshold, at every step."""

    def __init__(self, threshold: float, patience: int = 3) -> None:
        self.threshold, self.patience, self.violations = threshold, patience, 0

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Called by the Trainer after every step."""
        entry = state.log_history[-1] if state.log_history else {}
        if "loss" in entry:
            self.violations = self.violations + 1 if entry["loss"] > self.threshold else 0
            if self.violations >= self.patience:
                control.should_training_stop = True
        return control


def watched(losses: Any, *, threshold: float) -> np.ndarray:
    """At which steps Axolotl's watchdog has asked to stop: the Trainer logs after `on_step_end`."""
    state, control, watchdog = TrainerState(), TrainerControl(), LossWatchDog(threshold)
    asked = []
    for loss in losses:
        control = watchdog.on_step_end(None, state, control)  # type: ignore[arg-type]
        asked.append(control.should_training_stop)
        state.log_history.append({"loss": float(loss)})
    return np.array(asked)


class SelfHealing:
    """The rules of the self-healing callback, for one logged loss and gradient norm after another.

    Which of several rules goes first is left out: every rule that applies is reported.
    """

    divergence_patience = 50

    def __init__(self, *, nan_patience: int = 3, loss_spike_factor: float = 5.0) -> None:
        self.nan_patience, self.factor = nan_patience, loss_spike_factor
        self.window: deque[float] = deque(maxlen=100)
        self.nan = self.rises = 0

    def see(self, loss: float, norm: float) -> set[str]:
        """The failures of this step."""
        failures = set()
        if not np.isfinite(loss):
            self.nan += 1
            return {"nan_loss"} if self.nan >= self.nan_patience else failures
        self.nan = 0
        if len(self.window) == 100 and loss > self.factor * float(np.mean(self.window)):
            failures.add("loss_spike")
        self.rises = self.rises + 1 if self.window and loss > self.window[-1] else 0
        if self.rises >= self.divergence_patience:
            failures.add("divergence")
        self.window.append(loss)
        if norm > 100.0:
            failures.add("grad_explosion")
        if norm < 1e-7:
            failures.add("grad_vanishing")
        return failures
