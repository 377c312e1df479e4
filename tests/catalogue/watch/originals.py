"""The originals' rules in plain Python from their sources: an oracle where none can be run.

`KillLossSpike` is llm-foundry's callback without Composer (which it needs, with GPUs' worth of
dependencies); `LossWatchDog` is Axolotl's, on transformers' own callback classes. Written from the
rules, faults included; step numbers as Composer's and the Trainer's are.
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

    def __init__(self, *, window: int = 100, multiplier: float = 2.0, patience: int = 4) -> None:
        self.window: deque[float] = deque(maxlen=window)
        self.size, self.multiplier, self.patience = window, multiplier, patience
        self.cap = 10.0
        self.outliers = 0
        self.batch = 0

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


def watched(losses: Any, *, threshold: float = 5.0, logging_steps: int = 1) -> np.ndarray:
    """At which steps Axolotl's watchdog has asked the Trainer to stop.

    As the Trainer calls it: a step ends first and is logged afterwards, so that the entry of a step
    is what the next one sees.
    """
    state, control, watchdog = TrainerState(), TrainerControl(), LossWatchDog(threshold)
    since: list[float] = []
    asked = []
    for step, loss in enumerate(losses, start=1):
        control = watchdog.on_step_end(None, state, control)  # type: ignore[arg-type]
        asked.append(control.should_training_stop)
        since.append(float(loss))
        if step % logging_steps == 0:
            state.log_history.append({"loss": sum(since) / len(since), "step": step})
            since = []
    return np.array(asked)
