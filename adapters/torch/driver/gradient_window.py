"""`GradientWindow`: the gradients of all optimizers since the last step."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from healcore.console import counted
from healcore.runtime.data.random_states import set_torch_states, torch_states
from healcore.runtime.store.ranks import Ranks
from healcore.torch.driver.accumulation import Accumulation
from healcore.torch.driver.ddp_gradients import DDPGradients, ddp_modules, obstacle_of
from healcore.torch.driver.pending_step import FollowedOptimizer
from healcore.torch.live_state import tensors_in
from healcore.torch.store.gloo import GlooRanks

_MAX_ITEMS = 1000
"""Maximum length of containers that are searched for tensors."""
_MAX_DEPTH = 4
"""Maximum nesting of containers that are searched for tensors."""


class GradientWindow:
    """Knows which optimizers have stepped, and computes gradients again in smaller parts.

    One `Accumulation` knows one optimizer. Questions about the whole run need all of them, because
    an optimizer may step in every batch, in some batches, or not any more:

        GAN           both optimizers step for each batch, one after the other
        fine-tuning   the optimizer of the first stage does not step any more

    It implements `healcore.runtime.faults.microbatches.Gradients`. A window is all parts since the
    last step. It starts without gradients, and the buffers are saved after each step, so only the
    states of random generators are saved here. A repeated window gives bit for bit the result of a
    window that started with the smaller parts:

        begin_window ─► part 1 ─► part 2 fails ─► redo_window ─► parts 1a, 1b, 2a, 2b ─► step

    Args:
        optimizers: the optimizers of the state.
        modules: the modules of the state.
    """

    def __init__(
        self, optimizers: Sequence[FollowedOptimizer], modules: Sequence[nn.Module]
    ) -> None:
        self._optimizers = optimizers
        self._accumulations = [optimizer.accumulation for optimizer in optimizers]
        self._modules = modules
        self._usual = set(self._accumulations)
        """The accumulations whose optimizers stepped for the last batch; at first all."""
        self._counted = dict.fromkeys(self._accumulations, 0)
        """The number of steps of each optimizer at the last `end_batch`."""
        self._idle = dict.fromkeys(self._accumulations, 0)
        """The number of batches since each optimizer's last step for which others have stepped."""
        self._has_judged = False
        """Whether any step had a gradient, and so was judged."""
        self._shared: DDPGradients | None = None

    # -- steps and losses -----------------------------------------------------------------------

    def end_batch(self, *, judged: bool) -> None:
        """Takes note of the optimizers that have stepped since the last call.

        Once each of several optimizers has stepped, their remaining gradients and losses are
        by-products: a GAN's generator loss also has gradients in the discriminator. A loss of NaN
        or Inf without a backward pass belongs to a batch that the loop itself has skipped.

        Args:
            judged: whether any step was judged since the last call.
        """
        self._has_judged = self._has_judged or judged
        stepped = self._stepped()
        for accumulation in self._accumulations:
            self._counted[accumulation] = accumulation.steps
            self._idle[accumulation] += judged
            if not judged:
                accumulation.drop_nonfinite_loss()
        for accumulation in stepped:
            self._idle[accumulation] = 0
        self._usual = stepped or self._usual
        if len(stepped) == len(self._accumulations) > 1:
            for accumulation in self._accumulations:
                accumulation.ignore()

    def no_step_reason(self) -> str:
        """See `Driver.no_step_reason`."""
        steps = self._steps()
        if self._has_judged or not steps:
            return ""
        return (
            f"optimizer.step() was called {counted(steps, 'time')}, and no "
            "parameter had a gradient, so nothing was trained. Check that zero_grad() is not "
            "called between backward() and step(), that the loss is not detached, and that the "
            "optimizer has the parameters of the model"
        )

    def may_save(self, patience: int | None) -> bool:
        """See `TorchDriver.may_save`.

        Args:
            patience: number of steps of the other optimizers after which gradients of an optimizer
                that does not step count as abandoned, or None to wait for every optimizer.
        """
        for accumulation in self._accumulations:
            is_abandoned = patience is not None and self._idle[accumulation] >= patience
            if accumulation.in_progress and not is_abandoned:
                return False
        return True

    def is_incomplete(self) -> bool:
        """Whether only some of the optimizers that stepped for the last batch have stepped since.

        For example the discriminator of a GAN, and not yet its generator.
        """
        stepped = self._stepped()
        return bool(stepped) and stepped < self._usual

    def _steps(self) -> int:
        """The number of steps of all optimizers."""
        return sum(accumulation.steps for accumulation in self._accumulations)

    def _stepped(self) -> set[Accumulation]:
        """The accumulations whose optimizers have stepped since the last `end_batch`."""
        return {each for each in self._accumulations if each.steps > self._counted[each]}

    # -- a window that is repeated --------------------------------------------------------------

    def is_accumulating(self) -> bool:
        """Whether any optimizer has gradients that it has not stepped with."""
        return any(accumulation.in_progress for accumulation in self._accumulations)

    def begin_window(self) -> None:
        """Saves the state at the start of a window: steps, random generators, graph nodes.

        A window is the micro-batches of one step. If memory runs out in it, it is repeated with the
        same random numbers.
        """
        self._begun_at = self._steps()
        self._random = torch_states()
        self._node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since `begin_window`.

        A step that a GradScaler has dropped counts too. The window cannot be repeated then: its
        micro-batches would train the changed weights, and the step would count twice.
        """
        return self._steps() > self._begun_at

    def redo_window(self, kept_alive: list[Any], *, clear_cache: bool) -> None:
        """Drops gradients and observed losses; restores random states and buffers.

        Args:
            kept_alive: what variables of the loop still refer to, see `free_graphs`. The list is
                emptied.
            clear_cache: whether the accelerator's unused memory is returned to the device.
        """
        for optimizer in self._optimizers:
            optimizer.accumulation.clear(used=True)
            optimizer.buffers.end(True)
        set_torch_states(self._random)
        free_graphs(kept_alive, since=self._node)
        kept_alive.clear()
        gc.collect()  # an exception and its frames refer to each other
        if clear_cache and torch.accelerator.is_available():
            torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()

    def between_ranks(self, ranks: Ranks) -> DDPGradients | str:
        """How the ranks' replicas repeat a window together.

        Args:
            ranks: the ranks of the run. Several of them step together.

        Returns:
            The gradients of the replicas, or the obstacle to repeating a window, as a sentence
            without a full stop.
        """
        assert isinstance(ranks, GlooRanks)
        steps = [accumulation.healing.healed_step for accumulation in self._accumulations]
        replicas = ddp_modules([step.optimizer for step in steps])
        obstacle = obstacle_of([*self._modules, *replicas], ranks)
        if any(step.all_reduce.ranks.has_parts for step in steps):
            obstacle = (
                "the parameters are spread over the ranks (FSDP2, tensor parallel, pipeline), "
                "which exchange them in the forward and backward passes"
            )
        if obstacle:
            return f"the other ranks wait in a collective that this rank has left: {obstacle}"
        self._shared = DDPGradients(replicas, self.has_stepped, ranks)
        return self._shared

    def close(self) -> None:
        """Removes hooks, and restores the modules."""
        for accumulation in self._accumulations:
            accumulation.close()
        if self._shared is not None:
            self._shared.close()


def free_graphs(values: Iterable[Any], *, since: int) -> None:
    """Frees the graphs of these tensors, whose backward pass does not run.

    A variable of the loop (`loss`) keeps its graph, and so the activations, until the loop assigns
    it again after the next forward pass.

    Args:
        values: tensors, containers of tensors, or other objects, which are ignored.
        since: lowest sequence number of the graph nodes to free.
    """
    for value in values:
        for tensor in tensors_in(value, _MAX_ITEMS, _MAX_DEPTH):
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                with suppress(RuntimeError):  # `detach_` raises for a view
                    tensor.detach_()
