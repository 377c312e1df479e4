"""`extend_log`: the policy's counts in the rows of the Trainer's log."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from healcore.runtime.run.incidents.metrics import changed_since
from healcore.torch.trainers.huggingface.trainer_internals import HfTrainer
from healcore.torch.trainers.patching import patched


def extend_log(
    trainer: HfTrainer, metrics: Callable[[], dict[str, float]], stack: ExitStack
) -> None:
    """Adds the entries of `metrics()` that have changed to each training row and the last row.

    A callback could not do this, because the callbacks of trackers run before the user's callbacks.

    Args:
        trainer: the Trainer, whose `log` is replaced.
        metrics: returns name -> number, such as "heal/skips" -> 2.
        stack: closed when the training ends, which restores `log`.
    """
    original = trainer.log
    before: dict[str, float] = {}

    @functools.wraps(original)
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs or "train_loss" in logs:  # the row is of the training
            logs = {**logs, **changed_since(before, metrics())}
        original(logs, *args, **kwargs)

    stack.enter_context(patched(trainer, "log", log))
