"""`GradientWindow`: drops the gradients of a step that ran out of memory, to compute them again."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from healcore.runtime.data.random_states import set_torch_states, torch_states
from healcore.runtime.store.ranks import Ranks
from healcore.torch import gradients
from healcore.torch.driver.ddp_gradients import DDPGradients, obstacle_of, replicas
from healcore.torch.driver.followed_optimizer import FollowedOptimizer
from healcore.torch.live_state import tensors_in
from healcore.torch.ranks import StepRanks
from healcore.torch.store.gloo import GlooRanks

_MAX_ITEMS = 1000
"""Maximum length of containers that are searched for tensors."""
_MAX_DEPTH = 4
"""Maximum nesting of containers that are searched for tensors."""


class GradientWindow:
    """The gradients of a window, which can be computed again in smaller parts.

    Implements `healcore.runtime.faults.microbatches.Gradients`. A window is all parts since the
    last step. It starts without gradients, and `LayerBuffers` has already saved the buffers, so
    only the states of random generators are saved here. A repeated window gives bit for bit the
    result of a window that started with the smaller parts:

        begin_window ─► part 1 ─► part 2 fails ─► redo_window ─► parts 1a, 1b, 2a, 2b ─► step

    Args:
        optimizers: the optimizers of the state.
        scaler: the GradScaler of the state, or None.
        modules: the modules of the state.
    """

    def __init__(
        self,
        optimizers: Sequence[FollowedOptimizer],
        scaler: torch.amp.GradScaler | None,
        modules: Sequence[nn.Module],
    ) -> None:
        self._optimizers = optimizers
        self._scaler = scaler
        self._modules = modules
        self._shared: DDPGradients | None = None
        self.begin_window()

    def is_accumulating(self) -> bool:
        """Whether any optimizer has gradients that it has not stepped with."""
        return any(optimizer.accumulation.in_progress for optimizer in self._optimizers)

    def begin_window(self) -> None:
        """Saves the state at the start of a window: steps, random generators, graph nodes.

        A window is the micro-batches of one step. If memory runs out in it, it is repeated with the
        same random numbers.
        """
        self._steps_at_start, self._records_at_start = self._steps_and_records()
        self._random = torch_states()
        self._node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since `begin_window`.

        A step that a GradScaler has dropped counts too. The window cannot be repeated then: its
        micro-batches would train the changed weights, and the step would count twice.
        """
        steps, records = self._steps_and_records()
        return steps != self._steps_at_start or records is not self._records_at_start

    def redo_window(self, kept_alive: list[Any], *, clear_cache: bool) -> None:
        """Drops gradients and observed losses; restores random states and buffers.

        Args:
            kept_alive: what variables of the loop still refer to, see `free_graphs`. The list is
                emptied.
            clear_cache: whether the accelerator's unused memory is returned to the device.
        """
        for optimizer in self._optimizers:
            optimizer.accumulation.clear()
            if optimizer.buffers is not None:
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
        optimizers: list[Optimizer] = []
        step_ranks: list[StepRanks] = []
        params: list[Tensor] = []
        for followed in self._optimizers:
            optimizer = followed.healing.optimizer
            optimizers.append(optimizer)
            step_ranks.append(followed.healing.healed_step.all_reduce.ranks)
            params += gradients.parameters(optimizer)
        modules = replicas(params, self._modules)
        obstacle = obstacle_of(step_ranks, modules, dist.get_process_group_ranks(ranks.group))
        if obstacle:
            return obstacle
        ddp_modules = [each for each in modules if isinstance(each, DistributedDataParallel)]
        self._shared = DDPGradients(ddp_modules, optimizers, ranks)
        return self._shared

    def close(self) -> None:
        """Removes hooks."""
        if self._shared is not None:
            self._shared.close()

    def _steps_and_records(self) -> tuple[int, Any]:
        """Steps so far, and the GradScaler's records.

        A GradScaler's update() replaces the records, even if it has called no optimizer.
        """
        steps = sum(optimizer.accumulation.steps for optimizer in self._optimizers)
        records = getattr(self._scaler, "_per_optimizer_states", None)
        return steps, records


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
