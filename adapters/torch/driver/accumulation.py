"""`Accumulation`: the gradients since the last step of one optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from healcore.torch import gradients
from healcore.torch.attachment import Healing


class Accumulation:
    """Tracks whether `.grad` holds gradients that the optimizer has not stepped with yet.

    Many loops clear gradients only before the next backward pass, so hooks record each backward
    pass and step. Losses count too, because some wrappers write `.grad` without autograd.

    The hook of a backward pass is on one parameter, because a hook on each would cost time:

        backward pass     ─► _on_backward    there are gradients that no step has used
        optimizer.step()  ─► on_step         every gradient was used
        zero_grad()                          no hook: `in_progress` looks at `.grad`

    Args:
        healing: the handle of the optimizer.
        after_step: a bound method, called after each step. Only a weak reference to it is kept.

    Attributes:
        stepped: whether the optimizer has stepped; the reader resets it.
        steps: number of steps so far.
        idle: number of steps of other optimizers since this optimizer's last step.
        reached_since_any_step: whether a backward pass has run since the last step of any
            optimizer; `OptimizerSteps.on_step` resets it.
    """

    def __init__(self, healing: Healing, after_step: Callable[[], object]) -> None:
        self.healing = healing
        self._after_step = weakref.WeakMethod(after_step)  # hooks are not collected in cycles
        self._reached = False
        """Whether a backward pass has run since the optimizer's last step."""
        self.stepped = False
        self.reached_since_any_step = False
        self.steps = 0
        self.idle = 0
        self._watched: Tensor | None = None
        """The parameter with the hook."""
        self._backward_handle: Any = None
        self._backward_hook: Any = torch.compiler.disable(self._on_backward)
        self._watch()

    @property
    def in_progress(self) -> bool:
        """Whether there are gradients that the optimizer has not stepped with.

        True if a backward pass or a loss has followed the last step, and a `.grad` is not None. The
        gradients of the last step stay in `.grad` until the loop calls `zero_grad`. They do not
        count.
        """
        self._watch()
        if not (self._reached or self.healing.has_loss):
            return False
        return any(p.grad is not None for p in gradients.parameters(self.healing.optimizer))

    def drop_by_products(self) -> None:
        """Ignores gradients and losses that a step of another optimizer has left.

        `zero_grad` drops the gradients. The losses are dropped here, because a checkpoint has no
        losses: a restored run judges its next step without them.
        """
        self._reached = False
        self.healing.drop_losses()

    def clear(self, *, used: bool = True) -> None:
        """Drops the gradients and losses since the last step, which the program computes again.

        Args:
            used: whether gradients that the optimizer has stepped with are dropped too. Otherwise
                they become 0: a CUDA graph writes into their memory, and without `.grad` no later
                step would train.
        """
        drops = used or self.in_progress
        for p in gradients.parameters(self.healing.optimizer):
            if drops:
                p.grad = None
            elif p.grad is not None:
                with torch.no_grad(), suppress(RuntimeError):  # an expanded tensor is not writable
                    p.grad.zero_()
        self._reached = False
        self.healing.drop_losses()

    def on_new_structure(self) -> None:
        """Moves the hook if the optimizer does not train the watched parameter any more.

        Called after the program has changed its model. Without this, no later backward pass would
        be seen, and a save within an accumulation would lose gradients.
        """
        params = gradients.parameters(self.healing.optimizer)
        if all(p is not self._watched for p in params):
            self._watched = None
            self._watch()

    def close(self) -> None:
        """Removes the hook."""
        if self._backward_handle is not None:
            self._backward_handle.remove()

    def _watch(self) -> None:
        """Moves the hook to a trained parameter if the watched parameter has been frozen."""
        if self._watched is not None and self._watched.requires_grad:
            return
        params = gradients.parameters(self.healing.optimizer)
        trained = next((p for p in params if p.requires_grad and p.is_leaf), None)
        if trained is None:
            return  # all parameters are frozen while another network trains
        if self._backward_handle is not None:
            self._backward_handle.remove()
        self._watched = trained
        self._backward_handle = trained.register_post_accumulate_grad_hook(self._backward_hook)

    def _on_backward(self, _: Tensor) -> None:
        self._reached = True
        self.reached_since_any_step = True

    def on_step(self) -> None:
        """Notes a step of the optimizer, see `StepListener.stepped`.

        The gradients that are still in `.grad` are used from here on, so a save is possible again.
        At the end the driver is called.
        """
        self._reached = False
        self.stepped = True
        self.steps += 1
        self.idle = 0
        self._watch()
        after_step = self._after_step()
        if after_step is not None:
            after_step()
