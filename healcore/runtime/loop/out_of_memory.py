"""`OutOfMemory`: repeats a step in smaller parts, or stops with a diagnosis, if memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from healcore.core.verdict import Cause, names
from healcore.runtime.driver import Driver
from healcore.runtime.faults import Fault, classify
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.loop.data import Data
from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes
from healcore.runtime.microbatches.splitting import UnsplittableBatch, count_samples, split
from healcore.runtime.microbatches.window import (
    Count,
    Microbatch,
    MicrobatchError,
    Synchronization,
    part_weights,
    released,
)
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import RankFailed, Ranks

_NOT_TRIED = "healcore has not tried smaller parts of the batch"


class _Entry(NamedTuple):
    """A batch since the last step, with the arguments of `OutOfMemory.parts`."""

    batch: Any
    count: Count
    most: int | None
    whole: str


class _Overrun(NamedTuple):
    """A part that did not fit into memory."""

    samples: int
    """Samples of the part's batch; 0 if smaller parts are impossible."""
    parts: int
    """Number of parts that the batch was split into."""
    sign: str
    """Feature by which the exception was classified."""
    line: str
    """First line of the exception."""
    why_not: str
    """Reason why smaller parts are impossible, or an empty string."""


class OutOfMemory:
    """Handles parts that run out of memory, by the policy. See `Healer.microbatches`.

    Every rank changes the sizes by the reports of all ranks, so that the sizes are equal on all
    ranks.

    Attributes:
        sizes: sizes of the parts that fit into memory, as far as known.
        part: the current part, or None.
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
        self.sizes = MicrobatchSizes(shrinks=policy.budget.shrinks)
        self.part: Microbatch[Any] | None = None
        self._gradients = driver.gradient_window()
        self._last_resort: Callable[[], str] | None = None
        self._entries: list[_Entry] = []
        """The batches since the last step."""
        self._redoable = True
        """Whether all gradients come from the parts of this window."""
        self._held: list[Any] = []
        """Values of the failed part that variables of the loop refer to."""
        self._synchronization: Synchronization | str | None = None
        """How the ranks repeat a window, or why they cannot; None if each rank decides alone."""

    def resume(self) -> None:
        """Loads the sizes that an earlier process has saved."""
        saved = self._recovery.restorer.record.microbatches
        if saved is not None:
            self.sizes.load(saved)

    def parts(
        self,
        batch: Any,
        *,
        count: Count = None,
        most: int | None = None,
        whole: str = "",
        last_resort: Callable[[], str] | None = None,
    ) -> Iterator[Microbatch[Any]]:
        """Yields the parts of a batch; see `Healer.microbatches`.

        The context manager of a part catches the exception of its body, which this generator does
        not see. The generator then begins again with the first batch since the last step.

        Args:
            batch: as for `Healer.microbatches`, like `count` and `most`.
            count: see `batch`.
            most: see `batch`.
            whole: reason why this batch cannot be split, or an empty string.
            last_resort: called if no smaller part is left. Reduces a step's memory and describes
                the change: the parts then come again. Returns "" without a change.
        """
        self._last_resort = last_resort
        self._begin(whole)
        self._entries.append(_Entry(batch, count, most, whole))
        done = len(self._entries) - 1  # number of earlier batches of this window
        try:
            while True:
                for part in self._split(self._entries[done:], first=not done):
                    self.part = part
                    yield part
                    if not part.entered:
                        raise MicrobatchError(
                            "each part of healer.microbatches is a context manager: write "
                            "`with part:` around its forward and backward pass"
                        )
                    if part.failed:
                        break
                else:
                    return
                self.part = None
                self._undo()
                done = 0
        finally:
            self.part = None

    def drop_window(self) -> None:
        """Undoes the parts since the last step, whose batches the loop trains on again."""
        self._undo()
        self._entries.clear()

    # -- the window -----------------------------------------------------------------------------

    def _begin(self, whole: str) -> None:
        """Begins a new window, unless the current window still waits for its optimizer step."""
        accumulating = self._gradients.accumulating()
        if accumulating and self._entries and not self._gradients.has_stepped():
            return
        self._entries.clear()
        # Gradients from elsewhere cannot be computed again.
        self._redoable = not accumulating
        self._gradients.begin_window()
        alone = self._ranks.world == 1 or whole or self._policy_obstacle()
        if self._synchronization is None and not alone:
            self._synchronization = self._gradients.between_ranks(self._ranks)

    def _undo(self) -> None:
        clear_cache = "clear_cache" in self._answers
        self._gradients.redo_window(self._held, clear_cache=clear_cache)
        self._held.clear()
        self._data.forget_parts()

    def _split(self, entries: list[_Entry], *, first: bool) -> Iterator[Microbatch[Any]]:
        for entry in entries:
            number = self._number_of_parts(entry)
            pieces = split(entry.batch, number)
            weights = part_weights(pieces, entry.count)
            # Drops parts without tokens: their mean loss is NaN, and so is 0 times NaN.
            pairs = [pair for pair in zip(pieces, weights, strict=True) if pair[1]]
            if self._joint is not None:
                self._joint.begin_batch(first=first)
            for i, (piece, weight) in enumerate(pairs, 1):
                ends = i == len(pairs)
                last = ends and entry is entries[-1]
                on_exit = partial(self._leave, entry, number, ends)
                yield Microbatch(piece, weight, first=first, last=last, on_exit=on_exit)
                first = False

    def _number_of_parts(self, entry: _Entry) -> int:
        if entry.whole or (self.sizes.limit is None and entry.most is None):
            return 1
        try:
            samples = count_samples(entry.batch)
        except UnsplittableBatch:
            if entry.most is not None:
                raise
            return 1  # the whole batch may fit
        return self.sizes.parts(samples, entry.most)

    @property
    def _joint(self) -> Synchronization | None:
        """The synchronization of all ranks, or None if each rank decides alone."""
        return None if isinstance(self._synchronization, str) else self._synchronization

    # -- out of memory --------------------------------------------------------------------------

    def _leave(self, entry: _Entry, parts: int, ends: bool, error: BaseException | None) -> bool:
        """Ends one of the `parts` of a batch. Returns whether to repeat the window.

        Raises RunStopped on every rank if there is no smaller part, and RankFailed if another
        rank's batch cannot be split.
        """
        joint, overrun = self._joint, None
        if error is not None:
            overrun = self._overrun(entry, parts, error)
            if overrun is None:
                return False  # another kind of exception
        elif joint is None or not ends:
            return False
        overruns = [overrun]
        if joint is not None:
            if error is not None:
                released(error)  # the exchange needs a little memory
            if not joint.any_failed(overrun is not None):
                joint.reduce()
                return False
            overruns = self._ranks.gather(overrun)
        if overrun is not None and error is not None and overrun.why_not:
            error.add_note(f"{_NOT_TRIED}: {overrun.why_not}")
            return False  # the exception propagates
        failed = {rank: each for rank, each in enumerate(overruns) if each is not None}
        for rank, each in failed.items():
            if each.why_not:
                raise RankFailed(f"rank {rank}: {each.line}; {_NOT_TRIED}: {each.why_not}")
        # The smallest part that did not fit determines the size for all ranks.
        rank, smallest = min(failed.items(), key=lambda item: item[1].samples / item[1].parts)
        prefix = "" if joint is None else f"rank {', '.join(map(str, failed))}: "
        self._shrink(smallest, error or RankFailed(f"rank {rank}: {smallest.line}"), prefix)
        if error is not None:
            self._held = released(error)
        return True

    def _overrun(self, entry: _Entry, parts: int, error: BaseException) -> _Overrun | None:
        """The part that did not fit into memory, or None if it failed for another reason."""
        fault = classify(error)
        if fault.cause is not Cause.OOM or not isinstance(error, Exception):
            return None
        samples, why_not = 0, entry.whole or self._obstacle()
        if not why_not:
            try:
                samples = count_samples(entry.batch)
            except UnsplittableBatch as reason:
                why_not = str(reason)
        line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return _Overrun(samples, parts, fault.sign, line, why_not)

    def _obstacle(self) -> str:
        """Reason why the policy or the loop does not permit a redo, or an empty string."""
        if self._policy_obstacle():
            return self._policy_obstacle()
        if isinstance(self._synchronization, str):
            return (
                f"{self._synchronization}; pass the size that fits, "
                "healer.microbatches(batch, most=...), on every rank"
            )
        if not self._redoable:
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

    def _shrink(self, overrun: _Overrun, error: BaseException, rank: str) -> None:
        """Halves the parts, and reports it. Raises RunStopped if there is no smaller part."""
        step, fault, samples = self._data.step, Fault(Cause.OOM, overrun.sign), overrun.samples
        before = -(-samples // overrun.parts)
        try:
            size = self.sizes.shrink(samples, overrun.parts)
        except CannotShrink as reason:
            changed = "" if self._last_resort is None else self._last_resort()
            why = f"{rank}{reason}"
            if not changed:
                self._recovery.stop(why, error, Cause.OOM, cause=names(Cause.OOM))
            self._log.fault(step, fault, f"{why}: {changed}", answer="clear_cache")
            return
        self._log.fault(
            step,
            fault,
            f"{rank}{before} of {samples} samples do not fit into memory, the step is repeated "
            f"with {size} at a time: {overrun.line}",
            answer="shrink_microbatch",
            samples=samples,
            size_before=before,
            size=size,
        )
        self._recovery.restorer.record.microbatches = self.sizes.to_dict()  # for the next process
