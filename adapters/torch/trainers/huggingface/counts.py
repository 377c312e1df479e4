"""Copies what a Trainer counts with each micro-batch, to restore it when a step is done again."""

from __future__ import annotations

import copy
from typing import Any

COUNTERS = ("current_flos", "_step", "_total_train_tokens")
"""Attributes of Trainer, of GRPO and RLOO, of SFT and DPO; missing ones are left out."""


class LossCounts:
    """What TRL's trainers add to in `compute_loss`, as it is now: metrics and a number of tokens.

    The metrics are lists with one entry for each micro-batch since the last log.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._tokens = copy.deepcopy(getattr(trainer, "_total_train_tokens", None))
        metrics = getattr(trainer, "_metrics", None)
        self._lists = {
            mode: {name: (values, len(values)) for name, values in lists.items()}
            for mode, lists in (metrics if isinstance(metrics, dict) else {}).items()
            if isinstance(lists, dict)
        }

    def restore(self) -> None:
        """Takes back what was added since."""
        if self._tokens is not None:
            self._trainer._total_train_tokens = self._tokens
        for mode, lists in self._lists.items():
            metrics = self._trainer._metrics[mode]
            metrics.clear()
            for name, (values, length) in lists.items():
                del values[length:]
                metrics[name] = values


class WindowCounts:
    """The counts before the first micro-batch of a step. Copies one scalar, and reads none."""

    def __init__(self, trainer: Any) -> None:
        self.step = trainer.state.global_step
        self.in_loss = LossCounts(trainer)
        self.tokens_seen = trainer.state.num_input_tokens_seen
        self.tr_loss = trainer._tr_loss.clone()
        self.buffered = getattr(trainer, "_buffered_inputs", None)
        """GRPO's and RLOO's generated batches, which a later micro-batch of the step replaces."""
        self.counters = {
            name: copy.deepcopy(getattr(trainer, name))
            for name in COUNTERS
            if hasattr(trainer, name)
        }
