"""`DDPGradients`: DistributedDataParallel (DDP) when a part of a batch may run out of memory.

DDP broadcasts buffers in the forward pass, and reduces gradients in the backward pass. After a
failure on one rank the other ranks would wait there. Therefore buffers are broadcast before the
first part of a batch, the parts run as within `no_sync`, and the gradients are reduced after the
last part, when all ranks have voted that no part has failed.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from healcore.runtime.microbatches.parts import MicrobatchError
from healcore.torch.ranks import StepRanks
from healcore.torch.store.gloo import GlooRanks

_WAITING = "the other ranks wait in a collective that this rank has left: "


def obstacle(ranks: Sequence[StepRanks], modules: Iterable[nn.Module], members: list[int]) -> str:
    """Reason why ranks that train these modules cannot repeat a step together, or an empty string.

    Args:
        ranks: the ranks of each optimizer.
        modules: all modules that the run trains, with their submodules.
        members: the ranks that vote, in the default group.
    """
    if any(each.has_parts for each in ranks):
        return (
            _WAITING + "the parameters are spread over the ranks (FSDP2, tensor parallel, "
            "pipeline), which exchange them in the forward and backward passes"
        )
    for each in modules:
        kind = type(each).__name__
        if isinstance(each, nn.SyncBatchNorm):
            return _WAITING + "SyncBatchNorm exchanges batch statistics in the forward pass"
        if kind in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            return _WAITING + f"{kind} communicates in forward and backward passes"
        if not isinstance(each, DistributedDataParallel):
            continue
        if (
            each.static_graph
            or each.mixed_precision is not None
            or each._delay_all_reduce_params
            or each._use_python_reducer
            or each._join_config.enable
            or each._comm_hooks
            or hasattr(each, "buffer_hook")
        ):
            return (
                _WAITING + "DistributedDataParallel cannot be delayed with static_graph=True, "
                "mixed_precision, join(), a communication hook or another reducer"
            )
        if not set(dist.get_process_group_ranks(each.process_group)) <= set(members):
            return (
                _WAITING + "DistributedDataParallel has ranks that this Healer does not have: "
                "pass its group, Healer(..., attach={'process_group': group})"
            )
    return ""


def replicas(params: Sequence[Tensor], roots: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules with their submodules, and the DDP modules that train any of `params`.

    A state often has the module inside DDP, which does not refer to DDP. Visits all Python objects.
    """
    trained = {*map(id, params)}
    found = {id(m): m for root in roots for m in root.modules()}
    for each in gc.get_objects():
        if not issubclass(type(each), DistributedDataParallel) or id(each) in found:
            continue
        if any(id(p) in trained for p in each.parameters()):
            found.update((id(m), m) for m in each.modules())
    return [*found.values()]


class DDPGradients:
    """Implements `healcore.runtime.microbatches.parts.Synchronization`.

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
        self._params = [_reduced_parameters(each) for each in modules]
        self._syncs = [True] * len(modules)
        """Whether the loop wants each module's gradients reduced after this batch."""
        self._broadcasts = [True] * len(modules)
        """Whether each module was to broadcast its buffers at the start of the window."""
        self._within_batch = False
        check: Any = torch.compiler.disable(self._check_step)
        self._handles = [each.register_step_pre_hook(check) for each in optimizers]

    def begin_batch(self, *, first: bool) -> None:
        """Broadcasts buffers, as DDP's next forward pass would, and prevents other exchanges."""
        if self._within_batch:  # the loop has left the last batch early
            self._end_batch(self._broadcasts)
        if first:
            self._broadcasts = [each.require_forward_param_sync for each in self._modules]
        self._syncs = [each.require_backward_grad_sync for each in self._modules]
        self._within_batch = True
        for each in self._modules:
            if each.will_sync_module_buffers():
                each._sync_buffers()
            each.require_forward_param_sync = each.require_backward_grad_sync = False

    @torch.no_grad()
    def end_batch(self, failed: bool) -> bool:
        """Averages the gradients over each module's ranks, unless the loop uses `no_sync`.

        One `all_reduce` on the host of a byte, and of a byte for each parameter of DDP. A gradient
        that is missing on this rank only counts as 0.
        """
        has_gradient = [p.grad is not None for params in self._params for p in params]
        votes = self._ranks.largest([failed, *has_gradient])
        syncs, used = self._syncs, iter(votes[1:])
        # A repeated window broadcasts buffers as the failed window has.
        self._end_batch(self._broadcasts if votes[0] else syncs)
        if votes[0]:
            return True
        sums: list[Any] = []
        for each, params, reduces in zip(self._modules, self._params, syncs, strict=True):
            group = each.process_group
            for p in params:
                if not next(used) or not reduces:
                    continue
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                total = grad.contiguous().div_(dist.get_world_size(group))
                sums.append((p, grad, total, dist.all_reduce(total, group=group, async_op=True)))
        for p, grad, total, work in sums:
            work.wait()
            p.grad = grad if grad is total else grad.copy_(total)
        return False

    def close(self) -> None:
        """Restores the modules."""
        if self._within_batch:
            self._end_batch(self._broadcasts)
        for handle in self._handles:
            handle.remove()

    def _end_batch(self, broadcasts: list[bool]) -> None:
        self._within_batch = False
        for each, syncs, broadcast in zip(self._modules, self._syncs, broadcasts, strict=True):
            each.require_backward_grad_sync = syncs
            each.require_forward_param_sync = broadcast

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._within_batch and self._modules:
            raise MicrobatchError(
                "optimizer.step() was called before the end of the loop over healer.microbatches, "
                "where the gradients are not reduced over the ranks yet: call it after the loop"
            )


def _reduced_parameters(ddp: DistributedDataParallel) -> list[Tensor]:
    """The parameters that a DDP module reduces."""
    named, ignored = ddp.module.named_parameters(), ddp.parameters_to_ignore
    return [p for name, p in named if p.requires_grad and name not in ignored]
