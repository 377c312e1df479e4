"""`OutOfMemory`: repeats a step in smaller parts, or stops with a diagnosis, if memory runs out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from healcore.core.verdict import Cause, names
from healcore.runtime.driver import Driver
from healcore.runtime.faults import Fault, classify
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.loop.data import Data
from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes, Resize
from healcore.runtime.microbatches.splitting import BatchSize, UnsplittableBatch
from healcore.runtime.microbatches.window import (
    AccumulationWindow,
    DistributedWindow,
    Failure,
    Synchronization,
    released,
)
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import RankFailed, Ranks

_BYTES = re.compile(r"allocat(?:e|ing)\s+([\d.]+)\s*(bytes|[KMGT]?i?B)\b", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_NOT_TRIED = "healcore has not tried smaller parts of the batch"


class _Overrun(NamedTuple):
    """A part that did not fit into memory."""

    size: BatchSize | None
    """Size of the part's batch, or None if smaller parts are impossible."""
    parts: int
    """Number of parts that the batch was split into."""
    sign: str
    """Feature by which the exception was classified."""
    line: str
    """First line of the exception."""
    bytes: int | None
    """Size of the failed allocation, or None if the exception does not name it."""
    why_not: str
    """Reason why smaller parts are impossible, or an empty string."""


class OutOfMemory:
    """Handles parts that run out of memory, by the policy. See `Healer.microbatches`.

    Every rank changes the sizes by the reports of all ranks, so that the sizes are equal on all
    ranks.

    Attributes:
        sizes: Sizes of the parts that fit into memory, as far as known.
        window: The batches since the last step.
        last_resort: See `Healer.microbatches`.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        data: Data,
        recovery: Recovery,
        ranks: Ranks,
        log: RunLog,
    ) -> None:
        self._policy = policy
        self._data = data
        self._recovery = recovery
        self._ranks = ranks
        self._log = log
        self._answers = policy.answers(Cause.OOM)
        self.last_resort: Callable[[], str] | None = None
        self.sizes = MicrobatchSizes(shrinks=policy.shrinks, grow_after=policy.refund_after)
        self._gradients = driver.gradient_window()
        self._ranks_obstacle = ""
        """Reason why the ranks cannot redo a window together, or an empty string."""
        self.window = AccumulationWindow(
            self._gradients,
            self.sizes,
            on_failure=self._redo_alone,
            may_grow=lambda: None if recovery.ledger.open else data.step,
            on_growth=self._report_growth,
            on_redo=data.forget_parts,
            clear_cache="clear_cache" in self._answers,
            together=self._distributed_window if ranks.world > 1 else lambda: None,
        )

    def resume(self) -> None:
        """Loads the sizes that an earlier process has written to the journal."""
        restorer = self._recovery.restorer
        saved = None if restorer is None else restorer.journal.state.microbatches
        if saved is not None:
            self.sizes.load(saved)

    # -- one rank -------------------------------------------------------------------------------

    def _redo_alone(self, failure: Failure) -> bool:
        """Halves the parts if this is possible. Returns whether to redo this rank's window."""
        overrun = self._overrun(failure)
        if overrun is None:
            return False
        if overrun.why_not:
            failure.error.add_note(f"{_NOT_TRIED}: {overrun.why_not}")
            return False
        self._shrink(overrun, failure.error)
        return True

    def _overrun(self, failure: Failure) -> _Overrun | None:
        """The part that did not fit into memory, or None if it failed for another reason."""
        fault = classify(failure.error)
        if fault.cause is not Cause.OOM or not isinstance(failure.error, Exception):
            return None
        size, why_not = None, self._obstacle(failure)
        if not why_not:
            try:
                size = failure.size()
            except UnsplittableBatch as reason:
                why_not = str(reason)
        line = f"{type(failure.error).__name__}: {failure.error}".splitlines()[0][:300]
        nbytes = _bytes(failure.error)
        return _Overrun(size, failure.parts, fault.sign, line, nbytes, why_not)

    def _obstacle(self, failure: Failure) -> str:
        """Reason why the policy or the loop does not permit a redo, or an empty string."""
        if self._policy_obstacle():
            return self._policy_obstacle()
        if self._ranks_obstacle:
            return (
                f"{self._ranks_obstacle}; pass the size that fits, healer.microbatches(batch, "
                "most=...), on every rank"
            )
        if not failure.redoable:
            return (
                "gradients existed before the first part of the batch, and a repeated step would "
                "discard them: compute these gradients within a part too, or call "
                "zero_grad(set_to_none=True) before the first part"
            )
        return ""

    def _policy_obstacle(self) -> str:
        if self._policy.observes:
            return "the policy only observes"
        if "shrink_microbatch" not in self._answers:
            return (
                f'policy {self._policy.name} has no rule for out of memory: add to = ["oom"], '
                'do = ["shrink_microbatch", "clear_cache"]'
            )
        return ""

    def _shrink(self, overrun: _Overrun, error: BaseException, rank: str = "") -> None:
        """Halves the parts, and reports it. Raises RunStopped if there is no smaller part."""
        assert overrun.size is not None  # `why_not` is empty
        step = self._data.step
        try:
            resize = self.sizes.shrink(overrun.size, overrun.parts, step)
        except CannotShrink as reason:
            changed = "" if self.last_resort is None else self.last_resort()
            why = f"{rank}{reason}"
            fault, cause = Fault(Cause.OOM, overrun.sign), names(Cause.OOM)
            if not changed:
                self._recovery.stop(why, error, Cause.OOM, cause=cause, bytes=overrun.bytes)
            self._log.fault(
                step, fault, f"{why}: {changed}", answer="clear_cache", bytes=overrun.bytes
            )
            return
        self._log.fault(
            step,
            Fault(Cause.OOM, overrun.sign),
            f"{rank}{resize.before} of {resize.samples} samples do not fit into memory, the step "
            f"is repeated with {resize.after} at a time: {overrun.line}",
            answer="shrink_microbatch",
            samples=resize.samples,
            size_before=resize.before,
            size=resize.after,
            bytes=overrun.bytes,
        )
        self._save_sizes()

    def _grow(self, size: BatchSize) -> None:
        resize = self.sizes.grow(size, self._data.step)
        if resize is not None:
            self._report_growth(resize)

    def _report_growth(self, resize: Resize) -> None:
        step = self._data.step
        self._log.event(
            "grow",
            step=step,
            samples=resize.samples,
            size_before=resize.before,
            size=resize.after,
        )
        self._log.info(
            f"step {step}: tries {resize.after} samples at a time again, not {resize.before}"
        )
        self._save_sizes()

    def _save_sizes(self) -> None:
        """Writes the sizes for the next process."""
        restorer = self._recovery.restorer
        if restorer is not None:
            restorer.journal.state.microbatches = self.sizes.to_dict()
            restorer.write_journal(self._data.step)

    # -- several ranks --------------------------------------------------------------------------

    def _distributed_window(self) -> DistributedWindow | None:
        """The window that all ranks redo together, or None if each rank has its own."""
        if self._policy_obstacle():
            return None
        result = self._gradients.between_ranks(self._ranks)
        self._ranks_obstacle = result if isinstance(result, str) else ""
        if isinstance(result, str):
            return None
        sync = result

        def redo(failure: Failure | None, growing: BatchSize | None) -> bool:
            if failure is None:
                return self._decide(sync, None, None, growing)
            return self._redo_together(sync, failure)

        return DistributedWindow(sync, redo)

    def _redo_together(self, sync: Synchronization, failure: Failure) -> bool:
        """Whether all ranks redo the window.

        Raises RunStopped on every rank if there is no smaller part, and RankFailed if another
        rank's batch cannot be split.
        """
        overrun = self._overrun(failure)
        if overrun is None:
            return False
        released(failure.error)  # the exchange needs a little memory
        if sync.complete() and self._decide(sync, failure.error, overrun, None):
            return True
        why = overrun.why_not or (
            "the other ranks have not left their parts and probably wait for this rank: within a "
            "part only DistributedDataParallel may communicate"
        )
        failure.error.add_note(f"{_NOT_TRIED}: {why}")
        return False

    def _decide(
        self,
        sync: Synchronization,
        error: BaseException | None,
        mine: _Overrun | None,
        growing: BatchSize | None,
    ) -> bool:
        """Whether all ranks redo the window.

        Args:
            sync: synchronization of the ranks.
            error: exception of this rank's part, or None after the last part of its batch.
            mine: this rank's part if it did not fit, or None.
            growing: size of the batch if larger parts are due, or None.
        """
        votes = sync.vote(failed=mine is not None, grows=growing is not None)
        if votes is None:
            return False
        failed, grows = votes
        if failed:
            return self._shrink_together(error, self._ranks.gather(mine))
        sync.reduce()
        if grows:
            largest: dict[str, BatchSize] = {}
            sizes: list[BatchSize | None] = self._ranks.gather(growing)
            for each in sizes:
                if each is not None and each.elements >= largest.get(each.kind, each).elements:
                    largest[each.kind] = each
            for _, each in sorted(largest.items()):
                self._grow(each)
        return False

    def _shrink_together(
        self, error: BaseException | None, overruns: list[_Overrun | None]
    ) -> bool:
        kinds: dict[str, list[tuple[float, int, _Overrun]]] = {}
        for rank, each in enumerate(overruns):
            if each is None:
                continue
            if each.size is None:
                if rank == self._ranks.rank:
                    return False  # its own exception propagates
                raise RankFailed(f"rank {rank}: {each.line}; {_NOT_TRIED}: {each.why_not}")
            part = each.size.elements / each.parts
            kinds.setdefault(each.size.kind, []).append((part, rank, each))
        for _, kind in sorted(kinds.items()):
            # The smallest part that did not fit determines the size for all ranks.
            _, rank, smallest = min(kind)
            ranks = ", ".join(str(each) for _, each, _ in kind)
            cause = error or RankFailed(f"rank {rank}: {smallest.line}")
            self._shrink(smallest, cause, f"rank {ranks}: ")
        return True


def _bytes(error: BaseException) -> int | None:
    """Size of the failed allocation in a message of torch or XLA, or None."""
    match = _BYTES.search(str(error))
    if match is None:
        return None
    unit = match[2].lower().removesuffix("bytes").removesuffix("b").removesuffix("i")
    return int(float(match[1]) * 1024 ** _UNITS[unit])
