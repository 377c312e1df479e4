"""`DDPGradients`: delays what DistributedDataParallel exchanges, so that a step can be repeated."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from healcore.runtime.faults.microbatches import MicrobatchError
from healcore.torch.ranks import StepRanks
from healcore.torch.store.gloo import GlooRanks

_WAITING = "the other ranks wait in a collective that this rank has left: "


def obstacle_of(
    ranks: Sequence[StepRanks], modules: Iterable[nn.Module], members: list[int]
) -> str:
    """Finds out why ranks that train these modules cannot repeat a step together.

    A rank that runs out of memory leaves its forward or backward pass. If the ranks exchange
    something there, and the exchange cannot be delayed (`DDPGradients`), the other ranks wait.

    Args:
        ranks: the ranks of each optimizer.
        modules: all modules that the run trains, with their submodules.
        members: the ranks that vote, in the default group.

    Returns:
        The obstacle as a sentence without a full stop, or an empty string if the ranks can.
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
    """Delays the exchanges of DistributedDataParallel (DDP), so that all ranks can repeat a batch.

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
