"""`clipping_after_measuring`: Lightning's own clipping, after the policy has measured the norm."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from healcore.torch.attachment import Healing
from healcore.torch.healed_step import StepListener
from healcore.torch.measurement import Measurement
from healcore.torch.trainers.hook import patched


def clipping_after_measuring(
    plugin: Any, healings: Mapping[str, Healing]
) -> AbstractContextManager[None]:
    """Postpones Lightning's clipping of a step until the policy has measured the norm.

    Args:
        plugin: the Trainer's precision plugin, whose method `clip_gradients` is replaced.
        healings: name of an optimizer -> its handle.

    Returns:
        A context manager, at whose end Lightning clips as before.
    """
    clip_now = plugin.clip_gradients
    postponed: dict[Optimizer, Callable[[], None]] = {}
    steps = {each.optimizer: each.healed_step for each in healings.values()}

    def clip(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        call = functools.partial(clip_now, optimizer, *args, **kwargs)
        if optimizer not in steps or steps[optimizer].in_update:  # L-BFGS evaluates again
            call()
        else:
            postponed[optimizer] = call

    def clip_postponed(optimizer: Optimizer) -> None:
        call = postponed.pop(optimizer, None)
        if call is not None:
            call()

    for optimizer, step in steps.items():
        clip_step = functools.partial(clip_postponed, optimizer)
        step.listener = _ClipAfterJudging(step.listener, clip_step)
    return patched(plugin, "clip_gradients", clip)


class _ClipAfterJudging:
    """Passes each step on to the Healer's listener, and clips after the policy has measured.

    A `StepListener`.

    Args:
        listener: the listener of the Healer's driver.
        clip: makes Lightning's own clip of this step, if Lightning has asked for one.
    """

    def __init__(self, listener: StepListener, clip: Callable[[], None]) -> None:
        self._clip = clip
        self._listener = listener

    def judged(self, measured: Measurement) -> None:
        """See `StepListener.judged`."""
        self._listener.judged(measured)
        self._clip()

    def ended(self, skipped: bool | Tensor) -> None:
        """See `StepListener.ended`."""
        self._listener.ended(skipped)
