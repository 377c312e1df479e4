"""`StepReplacement`: replaces `step` of one optimizer object until it is undone."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer


class StepPlan(NamedTuple):
    """What `begin` decides about one call: to call the original `step`, or to skip it."""

    skipped: bool
    """Whether to skip the original `step`."""
    result: Any
    """The result of a skipped `step`."""
    args: tuple[Any, ...]
    """Arguments for the original `step`."""
    kwargs: dict[str, Any]
    """Keywords for the original `step`."""


class StepReplacement:
    """Replaces `step` of one optimizer object.

    A call of `optimizer.step()` then runs:

        begin ─► `step` as it was before, unless `begin` skips it ─► end

    Other code may wrap or store `step` before and after the replacement. A learning-rate scheduler
    wraps the function and marks the wrapper, which the replacement keeps. A `step` that was stored
    before bypasses the replacement, which the pre-hook notices. A `step` that was stored after the
    replacement stays callable after `undo`, and calls the original.

    Args:
        optimizer: the optimizer, without a wrapper.
        begin: called with the arguments and keywords of `step`.
        end: called with whether `step` has finished without an exception, and whether it was
            skipped.
        pre_hook: the pre-hook of the optimizer, which torch calls in every original `step`.

    Attributes:
        active: whether `step` is replaced.
        undo_stack: undoes with `undo` what a trainer or wrapper has changed besides `step`.
        pre_hook: the registered pre-hook; `attachment.healing_of` finds the `Healing` by it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        begin: Callable[[tuple[Any, ...], dict[str, Any]], StepPlan],
        end: Callable[[bool, bool], None],
        pre_hook: Callable[..., None],
    ) -> None:
        self.active = True
        self.undo_stack = ExitStack()
        # Dynamo must not trace what reads values, or writes to the optimizer.
        self.pre_hook: Any = torch.compiler.disable(pre_hook)
        self._begin: Any = torch.compiler.disable(begin)
        self._end: Any = torch.compiler.disable(end)
        self._restore_step = self._replace_step(optimizer)

    def undo(self) -> None:
        """Restores `step`, then everything on the `undo_stack`."""
        self.active = False
        self._restore_step()
        self.undo_stack.close()

    def _replace_step(self, optimizer: Any) -> Callable[[], None]:
        """Replaces `step`, and registers the pre-hook. Returns a function that restores both."""
        # `step` is usually a method of the class. A wrapper may have set it on the object.
        own_step = vars(optimizer).get("step")
        replacement = types.MethodType(self._make_step(optimizer.step), optimizer)
        optimizer.step = replacement
        handle = optimizer.register_step_pre_hook(self.pre_hook)

        def restore() -> None:
            handle.remove()
            if vars(optimizer).get("step") is replacement:
                del optimizer.step
                if own_step is not None:
                    optimizer.step = own_step

        return restore

    def _make_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that replaces `original`, the `step` before the replacement.

        A bound method is made of the result, because learning-rate schedulers wrap `__func__`.
        """
        begin = self._begin
        end = self._end

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            # A scheduler that was made after the replacement keeps this function after `undo`.
            if not self.active:
                return original(*args, **kwargs)
            finished = False
            skipped = False
            try:
                plan = begin(args, kwargs)
                skipped, result = plan.skipped, plan.result
                if not skipped:
                    result = original(*plan.args, **plan.kwargs)
                finished = True
            finally:
                end(finished, skipped)
            return result

        functools.update_wrapper(step, getattr(original, "__func__", original), updated=())
        replacement: Any = torch.compiler.disable(step, recursive=False)
        if hasattr(original, "_wrapped_by_lr_sched"):
            replacement._wrapped_by_lr_sched = True
        return replacement
