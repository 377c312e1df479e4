"""`DDPGradients`: DistributedDataParallel (DDP) when a part of a batch may run out of memory.

A part is a micro-batch, a window all parts since the last step. DDP communicates within a part: it
broadcasts buffers in the forward pass, and reduces gradients in the backward pass, bucket by
bucket. After a failure on one rank the other ranks would wait there. Therefore

- buffers are broadcast before a batch's first part;
- only the last part of a batch reduces gradients. In the first two windows, or if a part is not one
  forward and one backward pass of DDP, `reduce` does. It runs after a vote that no rank has failed;
- a failed rank completes the reduction without gradients (`complete`), and all drop the result.

`reduce` and `complete` use DDP's own reducer, with its buckets, communication hooks and unused
parameters: a backward pass through `_NoGradient` signals that all gradients have arrived.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from healcore.runtime.microbatches.window import MicrobatchError
from healcore.torch.ranks import StepRanks
from healcore.torch.store.gloo import GlooRanks

_WINDOWS = 2
"""Number of first windows without a reduction in backward passes. DDP changes its buckets after the
first window."""
PEER_TIMEOUT_S = 120.0
"""Seconds that a failed rank waits for the other ranks to finish their parts."""
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
        unlike = {
            "static_graph=True": each.static_graph,
            "mixed_precision": each.mixed_precision is not None,
            "delay_all_reduce_named_params": bool(each._delay_all_reduce_params),
            "torch.compile's python_reducer": each._use_python_reducer,
            "join()": each._join_config.enable,
            "a communication hook for buffers": hasattr(each, "buffer_hook"),
        }
        for name, used in unlike.items():
            if used:
                return _WAITING + f"DistributedDataParallel with {name} cannot be delayed"
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
    """Implements `healcore.runtime.microbatches.window.Synchronization`.

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
        self._replicas = [_Replica(each) for each in modules]
        self._ranks = ranks
        self._windows = 0
        self._irregular = len(modules) != 1 or not self._replicas[0].may_complete
        self._overlaps = self._in_part = self._last = False
        self._completed = self._wanted = False
        self._helper: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # Started now, because after an out-of-memory error a thread may get no stack.
        threading.Thread(target=_run_all, args=[self._helper], daemon=True).start()
        self._handles: list[Any] = []
        for each in self._replicas:
            before: Any = torch.compiler.disable(self._before_forward(each))
            after: Any = torch.compiler.disable(self._after_forward(each))
            self._handles += [
                each.ddp.register_forward_pre_hook(before),
                each.ddp.register_forward_hook(after, always_call=True),
            ]
        check: Any = torch.compiler.disable(self._check_step)
        self._handles += [each.register_step_pre_hook(check) for each in optimizers]

    def begin_window(self) -> None:
        """Decides whether backward passes reduce gradients, equally on every rank."""
        self._windows += 1
        self._overlaps = self._windows > _WINDOWS and not self._irregular
        for each in self._replicas:
            each.syncs_at_begin = each.ddp.require_forward_param_sync

    def begin_batch(self) -> None:
        """Does the communication of DDP's first forward pass."""
        self._wanted = self._completed = False
        for each in self._replicas:
            each.before_batch()

    def begin_part(self, *, last: bool) -> None:
        """Prepares the forward passes of a part. `last` marks the last part of a batch."""
        self._in_part, self._last = True, last
        for each in self._replicas:
            each.forwards, each.marked = 0, each.marks()

    def end_part(self) -> None:
        """Ends a part. Forward passes outside of parts are unchanged."""
        self._in_part = False

    def complete(self) -> bool:
        """Takes part, without gradients, in the reduction of the other ranks' last part."""
        self._completed = True
        if not self._overlaps:
            return True
        (replica,) = self._replicas
        outcome = SimpleQueue[bool]()

        def run() -> None:
            done = False
            with suppress(RuntimeError):  # the part has failed inside the reducer
                replica.complete(self._last)
                done = True
            outcome.put(done)

        self._helper.put(run)  # may wait until the group's time-out
        with suppress(Empty):
            return outcome.get(timeout=PEER_TIMEOUT_S)
        return False

    def vote(self, *, failed: bool, grows: bool) -> tuple[bool, bool] | None:
        """One `all_reduce` of 4 bytes, on the host: no rank waits for a device."""
        if not failed and not self._completed:
            self._look()
        votes = [failed, grows, self._irregular, self._wanted]
        try:
            found = self._ranks.largest([*map(int, votes)], PEER_TIMEOUT_S if failed else None)
        except RuntimeError:
            if failed:
                return None
            raise
        self._irregular, self._wanted = bool(found[2]), bool(found[3])
        return bool(found[0]), bool(found[1])

    def reduce(self) -> None:
        """Reduces gradients that no part has reduced, unless the loop uses `no_sync`."""
        if self._wanted and not self._overlaps:
            for each in self._replicas:
                each.reduce_all()

    def restart(self) -> None:
        """Starts a repeated window, whose parts do not reduce gradients."""
        self._overlaps = False
        for each in self._replicas:
            each.restart()

    def close(self) -> None:
        """Removes the hooks, and ends the thread."""
        self._helper.put(None)
        for handle in self._handles:
            handle.remove()

    # -- hooks ----------------------------------------------------------------------------------

    def _before_forward(self, replica: _Replica) -> Callable[..., None]:
        def before(module: nn.Module, args: Any) -> None:
            if self._in_part:
                wanted = replica.ddp.require_backward_grad_sync and torch.is_grad_enabled()
                replica.wants, replica.forwards = wanted, replica.forwards + wanted
                self._wanted |= wanted and self._last
                replica.hold_back(reduces=self._overlaps and self._last)

        return before

    def _after_forward(self, replica: _Replica) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            replica.end_hold_back()

        return after

    def _check_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._in_part and self._replicas:
            raise MicrobatchError(
                "optimizer.step() was called within `with part:`, where the gradients are not "
                "reduced over the ranks yet: call it after the loop over healer.microbatches"
            )

    def _look(self) -> None:
        """Records whether the last part has used DDP in an unusual way."""
        for each in self._replicas:
            reduced = not self._overlaps or each.marks() != each.marked
            self._irregular |= each.forwards != 1 or not reduced


def _run_all(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()


class _Replica:
    """A DDP module, and the gradients that its reducer has received."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        self._reducer: Any = ddp.reducer
        self._params = _reduced_parameters(ddp)
        self.may_complete = hasattr(self._reducer, "_reset_state")
        self.may_complete &= len(self._params) == len(self.marks())
        self.forwards = 0
        """Forward passes of this part whose gradients the loop wants reduced."""
        self.wants = False
        """Whether the loop wants the last forward pass's gradients reduced."""
        self.marked: list[int] = []
        """`marks` at the start of the part."""
        self.syncs_at_begin = True
        self._held: bool | None = None

    def marks(self) -> list[int]:
        """A number for each parameter, which changes with each reduction of its gradient."""
        return self._reducer.get_backward_stats()

    def before_batch(self) -> None:
        """Rebuilds buckets and broadcasts buffers, as the next forward pass would."""
        self._reducer._rebuild_buckets()
        if self.ddp.will_sync_module_buffers():
            self.ddp._sync_buffers()
            self.ddp.require_forward_param_sync = False

    def hold_back(self, *, reduces: bool) -> None:
        """Prepares a forward pass without a broadcast, whose backward pass may not reduce."""
        self._held = self.ddp.require_backward_grad_sync
        self.ddp.require_forward_param_sync = False
        self.ddp.require_backward_grad_sync &= reduces

    def end_hold_back(self) -> None:
        """Ends `hold_back`. The next batch broadcasts if this batch's gradients are reduced."""
        if self._held is not None:
            self.ddp.require_backward_grad_sync, self._held = self._held, None
            self.ddp.require_forward_param_sync = self.wants

    def restart(self) -> None:
        """Discards an interrupted reduction."""
        self._forget()
        self.ddp.require_forward_param_sync = self.syncs_at_begin

    def reduce_all(self) -> None:
        """Reduces all gradients."""
        self._reduce([p for p in self._params if p.requires_grad], begins=True)
        self._forget()

    def complete(self, last: bool) -> None:
        """Reduces the gradients that a failed part has not reduced."""
        now = self.marks()
        done = [last and a != b for a, b in zip(self.marked, now, strict=True)]
        missing = [p for p, each in zip(self._params, done, strict=True) if not each]
        if missing:
            self._reduce(missing, begins=not any(done))

    def _forget(self) -> None:
        """Discards the order in which gradients have arrived, on every rank.

        DDP builds its buckets in this order. Their reductions overlap with a backward pass only if
        the order comes from a real backward pass.
        """
        if self.may_complete:
            self._reducer._reset_state()

    def _reduce(self, params: list[Tensor], *, begins: bool) -> None:
        with torch.enable_grad():
            scalar = _NoGradient.apply(*params)
        if begins:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # there are no unused parameters
                self._reducer.prepare_for_forward()
                unused = self.ddp.find_unused_parameters
                self._reducer.prepare_for_backward([scalar] if unused else [])
        scalar.backward()
        self._reducer._check_reducer_finalized()


class _NoGradient(torch.autograd.Function):
    """Sends None as the gradient of each argument, which the reducer counts as an arrival."""

    @staticmethod
    def forward(ctx: Any, *params: Tensor) -> Tensor:
        ctx.number = len(params)
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return (None,) * ctx.number


def _reduced_parameters(ddp: DistributedDataParallel) -> list[Tensor]:
    """The parameters that a DDP module reduces, in the order of its reducer."""
    named = [
        (f"{path}.{name}" if path else name, p)
        for path, module in ddp.module.named_modules()
        for name, p in module.named_parameters(recurse=False)
    ]
    ignored = ddp.parameters_to_ignore
    return [*{id(p): p for n, p in named if p.requires_grad and n not in ignored}.values()]
