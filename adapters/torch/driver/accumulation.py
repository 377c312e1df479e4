"""`Accumulation`: the gradients since the last step of one optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
        steps: number of steps of the optimizer, including the steps that a GradScaler has dropped.
    """

    def __init__(self, healing: Healing, after_step: Callable[[], object]) -> None:
        self.healing = healing
        self._after_step = weakref.WeakMethod(after_step)  # hooks are not collected in cycles
        self.steps = 0
        self._reached = False
        """Whether a backward pass has run since the optimizer's last step."""
        self._watched: Tensor | None = None
        """The parameter with the hook."""
        self._handle: Any = None
        self._hook: Any = torch.compiler.disable(self._on_backward)
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

    def ignore(self) -> None:
        """Drops the losses since the last step, and takes the gradients for used.

        A checkpoint has no losses, so a restored run judges its next step without them.
        """
        self._reached = False
        self.healing.drop_losses()

    def drop_nonfinite_loss(self) -> None:
        """Drops the losses since the last step if they are NaN or Inf, and no backward pass ran."""
        loss = self.healing.healed_step.measurer.losses.mean()
        if not self._reached and loss is not None and not bool(loss.isfinite()):
            self.healing.drop_losses()

    def clear(self, *, used: bool) -> None:
        """Drops the gradients and losses since the last step, which the program computes again.

        Args:
            used: whether gradients that the optimizer has stepped with are dropped too. Otherwise
                they become 0: a CUDA graph writes into their memory, and without `.grad` no later
                step would train.
        """
        self.healing.optimizer.zero_grad(set_to_none=used or self.in_progress)
        self.ignore()

    def on_step(self) -> None:
        """Notes the end of a step. The gradients that are still in `.grad` are used from here on.

        At the end the driver is called.
        """
        self._reached = False
        self.steps += 1
        self._watch()
        after_step = self._after_step()
        if after_step is not None:
            after_step()

    def close(self) -> None:
        """Removes the hook."""
        if self._handle is not None:
            self._handle.remove()

    def _watch(self) -> None:
        """Puts the hook on the first trained parameter, which the program may freeze or replace."""
        params = gradients.parameters(self.healing.optimizer)
        trained = next((p for p in params if p.requires_grad and p.is_leaf), None)
        if trained is None or trained is self._watched:
            return  # None: all parameters are frozen while another network trains
        self.close()
        self._watched = trained
        self._handle = trained.register_post_accumulate_grad_hook(self._hook)

    def _on_backward(self, _: Tensor) -> None:
        self._reached = True
