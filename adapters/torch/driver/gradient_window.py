"""`GradientWindow`: the gradients of all optimizers since the last step, on all ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from healcore.console import counted
from healcore.runtime.data.random_states import set_torch_states, torch_states
from healcore.runtime.faults.microbatches import MicrobatchError
from healcore.runtime.store.ranks import Ranks
from healcore.torch import gradients
from healcore.torch.driver.followed_optimizer import FollowedOptimizer
from healcore.torch.live_state import tensors_in
from healcore.torch.store.gloo import GlooRanks

_MAX_ITEMS = 1000
"""Maximum length of containers that are searched for tensors."""
_MAX_DEPTH = 4
"""Maximum nesting of containers that are searched for tensors."""
_EXCHANGING = ("SyncBatchNorm", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Classes of modules that exchange values in forward or backward passes."""


class GradientWindow:
    """Knows which optimizers have stepped, and computes gradients again in smaller parts.

    One `FollowedOptimizer` knows one optimizer. Questions about the whole run need all of them,
    because an optimizer may step in every batch, in some batches, or not any more:

        GAN           both optimizers step for each batch, one after the other
        fine-tuning   the optimizer of the first stage does not step any more

    It implements `healcore.runtime.faults.microbatches.Gradients`. A window is all parts since the
    last step. It starts without gradients, and the buffers are saved after each step, so only the
    states of random generators are saved here. A repeated window gives bit for bit the result of a
    window that started with the smaller parts:

        begin_window ─► part 1 ─► part 2 fails ─► redo_window ─► parts 1a, 1b, 2a, 2b ─► step

    DistributedDataParallel (DDP) broadcasts buffers in the forward pass, and reduces gradients in
    the backward pass. After a failure on one rank the other ranks would wait there. Therefore
    buffers are broadcast before the first part of a batch, the parts run within `no_sync`, and the
    gradients are reduced after the last part:

        begin_parts    broadcast buffers
        part 1, 2, ..  nothing is exchanged
        end_parts      vote ─► no part has failed: average the gradients
                            ─► a part has failed on any rank: all ranks repeat the window

    Args:
        optimizers: the optimizers of the state.
        modules: the modules of the state.
    """

    def __init__(
        self, optimizers: Sequence[FollowedOptimizer], modules: Sequence[nn.Module]
    ) -> None:
        self._optimizers = optimizers
        self._modules = modules
        self._steps = 0
        """The number of steps of all optimizers."""
        self._stepped: set[FollowedOptimizer] = set()
        """The optimizers that have stepped since the last `end_batch`."""
        self._usual = set(optimizers)
        """The optimizers that stepped for the last batch; at first all."""
        self._idle = dict.fromkeys(optimizers, 0)
        """The number of batches since each optimizer's last step for which others have stepped."""
        self._has_judged = False
        """Whether any step had a gradient, and so was judged."""
        self._replicas: list[DistributedDataParallel] = []
        """The DDP modules whose exchanges are delayed. Other loops reduce gradients themselves."""
        self._no_sync = ExitStack()
        """The `no_sync` of each replica, within a batch."""

    # -- steps and losses -----------------------------------------------------------------------

    def on_step(self, optimizer: FollowedOptimizer) -> None:
        """Notes a step of an optimizer, or a step that a GradScaler has dropped."""
        self._steps += 1
        self._stepped.add(optimizer)

    def end_batch(self, *, judged: bool) -> None:
        """Takes note of the optimizers that have stepped since the last call.

        Once each of several optimizers has stepped, their remaining gradients and losses are
        by-products: a GAN's generator loss also has gradients in the discriminator.

        Args:
            judged: whether any step was judged since the last call.
        """
        self._has_judged = self._has_judged or judged
        has_byproducts = len(self._stepped) == len(self._optimizers) > 1
        for optimizer in self._optimizers:
            self._idle[optimizer] += judged
            if optimizer in self._stepped:
                self._idle[optimizer] = 0
            if has_byproducts:
                optimizer.ignore()
        self._usual = self._stepped or self._usual
        self._stepped = set()

    def no_step_reason(self) -> str:
        """See `Driver.no_step_reason`."""
        if self._has_judged or not self._steps:
            return ""
        return (
            f"optimizer.step() was called {counted(self._steps, 'time')}, and no "
            "parameter had a gradient, so nothing was trained. Check that zero_grad() is not "
            "called between backward() and step(), that the loss is not detached, and that the "
            "optimizer has the parameters of the model"
        )

    def may_save(self, patience: int | None = None) -> bool:
        """Whether no optimizer has gradients that it has not stepped with; see `TorchDriver`.

        Args:
            patience: number of steps of the other optimizers after which gradients of an optimizer
                that does not step count as abandoned, or None to wait for every optimizer.
        """
        for optimizer in self._optimizers:
            is_abandoned = patience is not None and self._idle[optimizer] >= patience
            if optimizer.in_progress and not is_abandoned:
                return False
        return True

    def is_incomplete(self) -> bool:
        """Whether only some of the optimizers that stepped for the last batch have stepped since.

        For example the discriminator of a GAN, and not yet its generator.
        """
        return bool(self._stepped) and self._stepped < self._usual

    # -- a window that is repeated --------------------------------------------------------------

    def is_accumulating(self) -> bool:
        """Whether any optimizer has gradients that it has not stepped with."""
        return not self.may_save()

    def begin_window(self) -> None:
        """Saves the state at the start of a window: steps, random generators, graph nodes.

        A window is the micro-batches of one step. If memory runs out in it, it is repeated with the
        same random numbers.
        """
        self._begun_at = self._steps
        self._random = torch_states()
        self._node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped since `begin_window`.

        A step that a GradScaler has dropped counts too. The window cannot be repeated then: its
        micro-batches would train the changed weights, and the step would count twice.
        """
        return self._steps > self._begun_at

    def redo_window(self, kept_alive: list[Any], *, clear_cache: bool) -> None:
        """Drops gradients and observed losses; restores random states and buffers.

        Args:
            kept_alive: what variables of the loop still refer to. The list is emptied.
            clear_cache: whether the accelerator's unused memory is returned to the device.
        """
        for optimizer in self._optimizers:
            optimizer.clear(used=True)
            optimizer.buffers.end(True)
        set_torch_states(self._random)
        for value in kept_alive:
            for tensor in tensors_in(value, _MAX_ITEMS, _MAX_DEPTH):
                # A variable of the loop (`loss`) keeps its graph, and so the activations, until the
                # loop assigns it again after the next forward pass.
                if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= self._node:
                    with suppress(RuntimeError):  # `detach_` raises for a view
                        tensor.detach_()
        kept_alive.clear()
        gc.collect()  # an exception and its frames refer to each other
        if clear_cache and torch.accelerator.is_available():
            torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()

    # -- a window that the ranks repeat together ------------------------------------------------

    def join_ranks(self, ranks: Ranks) -> str:
        """Prepares the ranks to repeat windows together.

        Args:
            ranks: the ranks of the run. Several of them step together.

        Returns:
            The obstacle as a sentence without a full stop, or an empty string.
        """
        assert isinstance(ranks, GlooRanks)
        steps = [optimizer.healing.healed_step for optimizer in self._optimizers]
        replicas = _replicas_of([step.optimizer for step in steps])
        obstacle = _obstacle_of([*self._modules, *replicas], ranks)
        if any(step.all_reduce.ranks.has_parts for step in steps):
            obstacle = (
                "the parameters are spread over the ranks (FSDP2, tensor parallel, pipeline), "
                "which exchange them in the forward and backward passes"
            )
        if obstacle:
            return f"the other ranks wait in a collective that this rank has left: {obstacle}"
        self._replicas = replicas
        self._ranks = ranks
        return ""

    def begin_parts(self) -> None:
        """Broadcasts buffers, as DDP's next forward pass would, and prevents other exchanges."""
        self._no_sync.close()  # the loop may have left the last batch early
        for module in self._replicas:
            if module.will_sync_module_buffers():
                module._sync_buffers()
            module.require_forward_param_sync = False
            self._no_sync.enter_context(module.no_sync())

    @torch.no_grad()
    def end_parts(self, failed: bool) -> bool:
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
        if self._replicas and self.has_stepped():
            raise MicrobatchError(
                "optimizer.step() was called before the end of the loop over healer.microbatches, "
                "where the gradients are not reduced over the ranks yet: call it after the loop"
            )
        params: list[tuple[DistributedDataParallel, Tensor]] = []
        votes: list[int] = [failed]
        for module in self._replicas:
            for name, p in module.module.named_parameters():
                if p.requires_grad and name not in module.parameters_to_ignore:
                    params.append((module, p))
                    votes.append(p.grad is not None)
        any_failed, *has_gradient = self._ranks.largest(votes)
        self._no_sync.close()
        for module in self._replicas:
            # A repeated window broadcasts buffers again.
            module.require_forward_param_sync = any_failed > 0 or module.require_backward_grad_sync
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
        """Removes hooks, and restores the modules."""
        for optimizer in self._optimizers:
            optimizer.close()
        self._no_sync.close()


def _replicas_of(optimizers: Iterable[Optimizer]) -> list[DistributedDataParallel]:
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


def _obstacle_of(modules: Iterable[nn.Module], ranks: GlooRanks) -> str:
    """Finds out why ranks that train these modules cannot repeat a step together.

    A rank that runs out of memory leaves its forward or backward pass. If the ranks exchange
    something there, and the exchange cannot be delayed (`begin_parts`), the other ranks wait.

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
                or module._use_python_reducer
                or module._join_config.enable
                or module._comm_hooks
                or not members.issuperset(dist.get_process_group_ranks(module.process_group))
            ):
                return (
                    "DistributedDataParallel cannot be delayed with static_graph=True, join(), a "
                    "communication hook, another reducer, or ranks that this Healer does not have"
                )
    return ""
