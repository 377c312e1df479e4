"""Tracks the gradients since the last optimizer step, and drops them to repeat the step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from healcore.runtime.data.random_states import set_torch_states, torch_states
from healcore.runtime.faults.microbatches import MicrobatchError
from healcore.runtime.store.ranks import Ranks
from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.driver.batch_statistics import BatchStatistics
from healcore.torch.live_state import tensors_in
from healcore.torch.ranks import StepRanks
from healcore.torch.store.gloo import GlooRanks

_MOST_ITEMS = 1000
"""Maximum length of containers that are searched for tensors."""
_DEPTH = 4
"""Maximum nesting of containers that are searched for tensors."""


class Accumulation:
    """Whether `.grad` holds gradients that an optimizer has not stepped with.

    Many loops clear gradients only before the next backward pass, so hooks record each backward
    pass and step. Losses count too, because some wrappers write `.grad` without autograd.

    The hook of a backward pass is on one parameter, because a hook on each would cost time:

        backward pass     ─► _on_backward    gradients that no step has used
        optimizer.step()  ─► on_step         none
        zero_grad()                          not seen; `in_progress` looks at `.grad`

    Args:
        healing: the handle of the optimizer.
        after_step: a bound method, called after each step. Only a weak reference to it is kept.

    Attributes:
        stepped: whether the optimizer has stepped; the reader resets it.
        steps: number of steps so far.
        idle: number of steps of other optimizers since this optimizer's last step.
        reached_since_any_step: whether a backward pass has run since the last step of any
            optimizer; the driver resets it.
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

        A backward pass or a loss since the last step, and a `.grad` that is not None. Gradients of
        the last step are still in `.grad` until the loop calls `zero_grad`, and do not count.
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
            used: whether gradients that the optimizer has stepped with are dropped too. A CUDA
                graph writes into their memory, and without `.grad` no later step would train.
        """
        if used or self.in_progress:
            for p in gradients.parameters(self.healing.optimizer):
                p.grad = None
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
        The driver is told at the end.
        """
        self._reached = False
        self.stepped = True
        self.steps += 1
        self.idle = 0
        self._watch()
        after_step = self._after_step()
        if after_step is not None:
            after_step()


class GradientWindow:
    """The gradients of a window, which can be computed again in smaller parts.

    Implements `healcore.runtime.faults.microbatches.Gradients`. A window is all parts since the
    last step. It starts without gradients, and `BatchStatistics` has already saved the statistics,
    so only the states of random generators are saved here. A repeated window gives bit for bit the
    result of a window that started with the smaller parts:

        begin_window ─► part 1 ─► part 2 fails ─► redo_window ─► parts 1a, 1b, 2a, 2b ─► step

    Args:
        accumulations: the gradients of each optimizer.
        statistics: the batch statistics of the state.
        scaler: the GradScaler of the state, or None.
        modules: the modules of the state.
    """

    def __init__(
        self,
        accumulations: Sequence[Accumulation],
        statistics: Sequence[BatchStatistics],
        scaler: torch.amp.GradScaler | None,
        modules: Sequence[nn.Module],
    ) -> None:
        self._accumulations = accumulations
        self._statistics = statistics
        self._scaler = scaler
        self._modules = modules
        self._shared: DDPGradients | None = None
        self.begin_window()

    def is_accumulating(self) -> bool:
        """Whether any optimizer has gradients that it has not stepped with."""
        return any(accumulation.in_progress for accumulation in self._accumulations)

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

    def redo_window(self, held: list[Any], *, clear_cache: bool) -> None:
        """Drops gradients and observed losses; restores random states and batch statistics.

        Args:
            held: what the failed part may keep alive, see `free_graphs`. The list is emptied.
            clear_cache: whether the accelerator's unused memory is returned to the device.
        """
        for accumulation in self._accumulations:
            accumulation.clear()
        for statistics in self._statistics:
            statistics.end(True)
        set_torch_states(self._random)
        free_graphs(held, since=self._node)
        held.clear()
        gc.collect()  # an exception and its frames refer to each other
        if clear_cache and torch.accelerator.is_available():
            torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()

    def between_ranks(self, ranks: Ranks) -> DDPGradients | str:
        """How the ranks' replicas repeat a window together.

        Args:
            ranks: the ranks of the run, of which several step together.

        Returns:
            The gradients of the replicas, or the reason why they cannot repeat a window.
        """
        assert isinstance(ranks, GlooRanks)
        optimizers: list[Optimizer] = []
        step_ranks: list[StepRanks] = []
        params: list[Tensor] = []
        for accumulation in self._accumulations:
            optimizers.append(accumulation.healing.optimizer)
            step_ranks.append(accumulation.healing.healed_step.all_reduce.ranks)
            params += gradients.parameters(accumulation.healing.optimizer)
        modules = replicas(params, self._modules)
        reason = obstacle(step_ranks, modules, dist.get_process_group_ranks(ranks.group))
        if reason:
            return reason
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
        steps = sum(accumulation.steps for accumulation in self._accumulations)
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
        for tensor in tensors_in(value, _MOST_ITEMS, _DEPTH):
            if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
                with suppress(RuntimeError):  # a view
                    tensor.detach_()


_WAITING = "the other ranks wait in a collective that this rank has left: "


def obstacle(ranks: Sequence[StepRanks], modules: Iterable[nn.Module], members: list[int]) -> str:
    """Reason why ranks that train these modules cannot repeat a step together.

    A rank that runs out of memory leaves its forward or backward pass. If the ranks exchange
    something there, and the exchange cannot be delayed (`DDPGradients`), the other ranks wait.

    Args:
        ranks: the ranks of each optimizer.
        modules: all modules that the run trains, with their submodules.
        members: the ranks that vote, in the default group.

    Returns:
        The reason as a sentence without a full stop, or an empty string.
    """
    if any(rank.has_parts for rank in ranks):
        return (
            _WAITING + "the parameters are spread over the ranks (FSDP2, tensor parallel, "
            "pipeline), which exchange them in the forward and backward passes"
        )
    for module in modules:
        kind = type(module).__name__
        if isinstance(module, nn.SyncBatchNorm):
            return _WAITING + "SyncBatchNorm exchanges batch statistics in the forward pass"
        if kind in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            return _WAITING + f"{kind} communicates in forward and backward passes"
        if not isinstance(module, DistributedDataParallel):
            continue
        if (
            module.static_graph
            or module.mixed_precision is not None
            or module._delay_all_reduce_params
            or module._use_python_reducer
            or module._join_config.enable
            or module._comm_hooks
            or hasattr(module, "buffer_hook")
        ):
            return (
                _WAITING + "DistributedDataParallel cannot be delayed with static_graph=True, "
                "mixed_precision, join(), a communication hook or another reducer"
            )
        if not set(dist.get_process_group_ranks(module.process_group)) <= set(members):
            return (
                _WAITING + "DistributedDataParallel has ranks that this Healer does not have: "
                "pass its group, Healer(..., attach={'process_group': group})"
            )
    return ""


def replicas(params: Sequence[Tensor], roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with their submodules, and the DDP modules that train any of `params`.

    A state often has the module inside DDP, which does not refer to DDP. Visits all Python objects.

    Args:
        params: the parameters that the run trains.
        roots: the modules of the state.

    Returns:
        Each module once: first the modules of the state, then the others.
    """
    trained = {id(p) for p in params}
    modules: dict[int, nn.Module] = {}
    for root in roots:
        for module in root.modules():
            modules[id(module)] = module
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), DistributedDataParallel) or id(candidate) in modules:
            continue
        if any(id(p) in trained for p in candidate.parameters()):
            for module in candidate.modules():
                modules[id(module)] = module
    return [*modules.values()]


class DDPGradients:
    """DistributedDataParallel (DDP) when a part of a batch may run out of memory.

    DDP broadcasts buffers in the forward pass, and reduces gradients in the backward pass. After a
    failure on one rank the other ranks would wait there. Therefore buffers are broadcast before the
    first part of a batch, the parts run as within `no_sync`, and the gradients are reduced after
    the last part, when all ranks have voted that no part has failed:

        begin_batch    broadcast buffers
        part 1, 2, ..  nothing is exchanged
        end_batch      vote ─► no part has failed: average the gradients
                            ─► a part has failed on any rank: all ranks repeat the window

    Args:
        modules: the DDP modules. Without DDP the loop reduces gradients itself, after the parts.
        optimizers: the optimizers, which must not step within a part.
        ranks: the ranks that vote.
    """

    def __init__(
        self,
        modules: Sequence[DistributedDataParallel],
        optimizers: Iterable[Optimizer],
        ranks: GlooRanks,
    ) -> None:
        self._modules = modules
        self._ranks = ranks
        self._params: list[list[Tensor]] = []
        """The parameters that each module reduces."""
        for module in modules:
            params: list[Tensor] = []
            for name, p in module.module.named_parameters():
                if p.requires_grad and name not in module.parameters_to_ignore:
                    params.append(p)
            self._params.append(params)
        self._syncs = [True] * len(modules)
        """Whether the loop wants each module's gradients reduced after this batch."""
        self._broadcasts = [True] * len(modules)
        """Whether each module was to broadcast its buffers at the start of the window."""
        self._within_batch = False
        check: Any = torch.compiler.disable(self._check_step)
        self._handles = [optimizer.register_step_pre_hook(check) for optimizer in optimizers]

    def begin_batch(self, *, first: bool) -> None:
        """Broadcasts buffers, as DDP's next forward pass would, and prevents other exchanges.

        Args:
            first: whether it is the first batch since the last step, or of a repeated window.
        """
        if self._within_batch:  # the loop has left the last batch early
            self._end_batch(self._broadcasts)
        if first:
            self._broadcasts = [module.require_forward_param_sync for module in self._modules]
        self._syncs = [module.require_backward_grad_sync for module in self._modules]
        self._within_batch = True
        for module in self._modules:
            if module.will_sync_module_buffers():
                module._sync_buffers()
            module.require_forward_param_sync = False
            module.require_backward_grad_sync = False

    @torch.no_grad()
    def end_batch(self, failed: bool) -> bool:
        """Averages the gradients over each module's ranks, unless the loop uses `no_sync`.

        Every rank calls it once per batch. The vote is one `all_reduce` on the host of a byte, and
        of a byte for each parameter of DDP. A gradient that is missing on this rank only counts as
        0.

        Args:
            failed: whether a part has failed on this rank.

        Returns:
            Whether a part has failed on any rank.
        """
        votes: list[int] = [failed]
        for params in self._params:
            for p in params:
                votes.append(p.grad is not None)
        any_failed, *has_gradient = self._ranks.largest(votes)
        if any_failed:
            # The repeated window broadcasts buffers as the failed window has.
            self._end_batch(self._broadcasts)
            return True
        self._end_batch(self._syncs)
        remaining = iter(has_gradient)
        # Parameter, gradient, the contiguous gradient that is reduced, and the running reduction.
        sums: list[tuple[Tensor, Tensor, Tensor, Any]] = []
        for module, params, is_reduced in zip(
            self._modules, self._params, self._syncs, strict=True
        ):
            group = module.process_group
            for p in params:
                has_any_gradient = next(remaining)
                if not has_any_gradient or not is_reduced:
                    continue
                grad = p.grad
                if grad is None:
                    grad = torch.zeros_like(p)
                total = grad.contiguous().div_(dist.get_world_size(group))
                work = dist.all_reduce(total, group=group, async_op=True)
                sums.append((p, grad, total, work))
        for p, grad, total, work in sums:
            work.wait()
            if grad is not total:
                grad.copy_(total)  # keeps the gradient's strides
            p.grad = grad
        return False

    def close(self) -> None:
        """Restores the modules."""
        if self._within_batch:
            self._end_batch(self._broadcasts)
        for handle in self._handles:
            handle.remove()

    def _end_batch(self, broadcasts: list[bool]) -> None:
        """Restores the modules' flags. `broadcasts`: whether each broadcasts buffers next."""
        self._within_batch = False
        for module, syncs, broadcast in zip(self._modules, self._syncs, broadcasts, strict=True):
            module.require_backward_grad_sync = syncs
            module.require_forward_param_sync = broadcast

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._within_batch and self._modules:
            raise MicrobatchError(
                "optimizer.step() was called before the end of the loop over healer.microbatches, "
                "where the gradients are not reduced over the ranks yet: call it after the loop"
            )
