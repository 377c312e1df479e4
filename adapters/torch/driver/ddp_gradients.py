"""`DDPGradients`: delays what DistributedDataParallel exchanges, so that a step can be repeated."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from healcore.runtime.faults.microbatches import MicrobatchError
from healcore.torch import gradients
from healcore.torch.store.gloo import GlooRanks

_EXCHANGING = ("SyncBatchNorm", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes of modules that exchange values in forward or backward passes."""


def ddp_modules(optimizers: Iterable[Optimizer]) -> list[DistributedDataParallel]:
    """The DDP modules that train any parameter of these optimizers. Visits all Python objects.

    A state often has the module inside DDP, which does not refer to DDP.

    Args:
        optimizers: the optimizers of the run, without wrappers.
    """
    trained: set[Tensor] = set()
    for optimizer in optimizers:
        trained.update(gradients.parameters(optimizer))
    found: list[DistributedDataParallel] = []
    for each in gc.get_objects():
        is_ddp = issubclass(type(each), DistributedDataParallel)
        if is_ddp and not trained.isdisjoint(each.parameters()):
            found.append(each)
    return found


def obstacle_of(modules: Iterable[nn.Module], ranks: GlooRanks) -> str:
    """Finds out why ranks that train these modules cannot repeat a step together.

    A rank that runs out of memory leaves its forward or backward pass. If the ranks exchange
    something there, and the exchange cannot be delayed (`DDPGradients`), the other ranks wait.

    Args:
        modules: the modules that the run trains, which have submodules.
        ranks: the ranks that vote.

    Returns:
        The obstacle as a sentence without a full stop, or an empty string if the ranks can.
    """
    members = {*dist.get_process_group_ranks(ranks.group)}
    for root in modules:
        for module in root.modules():
            kind = type(module).__name__
            if kind in _EXCHANGING:
                return f"{kind} exchanges values between the ranks in its forward or backward pass"
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
                or not members.issuperset(dist.get_process_group_ranks(module.process_group))
            ):
                return (
                    "DistributedDataParallel cannot be delayed with static_graph=True, "
                    "mixed_precision, join(), a communication hook, another reducer, or ranks that "
                    "this Healer does not have"
                )
    return ""


class DDPGradients:
    """Delays the exchanges of DistributedDataParallel (DDP), so that all ranks can repeat a batch.

    DDP broadcasts buffers in the forward pass, and reduces gradients in the backward pass. After a
    failure on one rank the other ranks would wait there. Therefore buffers are broadcast before the
    first part of a batch, the parts run within `no_sync`, and the gradients are reduced after the
    last part, when all ranks have voted that no part has failed:

        begin_batch    broadcast buffers
        part 1, 2, ..  nothing is exchanged
        end_batch      vote ─► no part has failed: average the gradients
                            ─► a part has failed on any rank: all ranks repeat the window

    Args:
        modules: the DDP modules. Without DDP the loop reduces gradients itself, after the parts.
        has_stepped: whether an optimizer has stepped within the window.
        ranks: the ranks that vote.
    """

    def __init__(
        self,
        modules: Sequence[DistributedDataParallel],
        has_stepped: Callable[[], bool],
        ranks: GlooRanks,
    ) -> None:
        self._modules = modules
        self._has_stepped = has_stepped
        self._ranks = ranks
        self._broadcasts: list[bool] = []
        """Whether each module was to broadcast its buffers at the start of the window."""
        self._no_sync = ExitStack()
        """The `no_sync` of each module, within a batch."""

    def begin_batch(self, *, first: bool) -> None:
        """Broadcasts buffers, as DDP's next forward pass would, and prevents other exchanges.

        Args:
            first: whether it is the first batch since the last step, or of a repeated window.
        """
        self._no_sync.close()  # the loop may have left the last batch early
        if first:
            self._broadcasts = [module.require_forward_param_sync for module in self._modules]
        for module in self._modules:
            if module.will_sync_module_buffers():
                module._sync_buffers()
            module.require_forward_param_sync = False
            self._no_sync.enter_context(module.no_sync())

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

        Raises:
            MicrobatchError: the loop has stepped before the gradients were reduced.
        """
        if self._modules and self._has_stepped():
            raise MicrobatchError(
                "optimizer.step() was called before the end of the loop over healer.microbatches, "
                "where the gradients are not reduced over the ranks yet: call it after the loop"
            )
        params: list[tuple[DistributedDataParallel, Tensor]] = []
        votes: list[int] = [failed]
        for module in self._modules:
            for name, p in module.module.named_parameters():
                if p.requires_grad and name not in module.parameters_to_ignore:
                    params.append((module, p))
                    votes.append(p.grad is not None)
        any_failed, *has_gradient = self._ranks.largest(votes)
        self._no_sync.close()
        for module, broadcasts in zip(self._modules, self._broadcasts, strict=True):
            # The repeated window broadcasts buffers as the failed window has.
            module.require_forward_param_sync = (
                broadcasts if any_failed else module.require_backward_grad_sync
            )
        if any_failed:
            return True
        for (module, p), has_any_gradient in zip(params, has_gradient, strict=True):
            if not has_any_gradient or not module.require_backward_grad_sync:
                continue
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            group = module.process_group
            total = p.grad.contiguous().div_(dist.get_world_size(group))
            dist.all_reduce(total, group=group)
            if p.grad is not total:
                p.grad.copy_(total)  # keeps the gradient's strides
        return False

    def close(self) -> None:
        """Restores the modules."""
        self._no_sync.close()
