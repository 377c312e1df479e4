"""`OutOfMemory`: repeats a step in smaller parts, or stops with a diagnosis, if memory runs out.

A step of one rank is also repeated, unchanged, after a transient failure in the network.

A *window* is all batches since the last optimizer step, whose gradients add up:

    parts(batch) --> part, part, ...        each is a context manager around a forward pass
                       | memory runs out in one of them, on any rank
                       v
    smaller parts, gradients back to the start of the window, its first batch again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from healcore.core.decision import Cause
from healcore.runtime.faults.classification import Fault, classify
from healcore.runtime.faults.microbatches import (
    Count,
    Microbatch,
    MicrobatchError,
    UnsplittableBatch,
    clear_frames,
    count_samples,
    part_weights,
    split,
)
from healcore.runtime.run.batch_parts import largest_part
from healcore.runtime.run.call_retries import retries_of
from healcore.runtime.run.memory_profile import memory_text
from healcore.runtime.store.ranks import RankFailed

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_NOT_TRIED = "healcore has not tried smaller parts of the batch"


class _Overrun(NamedTuple):
    """A part that did not fit into memory."""

    samples: int
    """Samples of the part's batch; 0 if smaller parts are impossible."""
    parts: int
    """Number of parts that the batch was split into."""
    fault: Fault
    """The classified exception."""
    line: str
    """First line of the exception."""
    obstacle: str
    """Reason why smaller parts are impossible, or an empty string."""


@dataclass
class _Window:
    """The batches since the last optimizer step, and whether they can be repeated."""

    split_obstacle: str = ""
    """Reason why the run's batches cannot be split, or an empty string."""
    owns_gradients: bool = True
    """Whether all gradients come from the parts of this window. Otherwise gradients existed before
    its first part, and a repeat would discard them."""
    repeat_obstacle: str = ""
    """Reason why the window cannot be repeated in smaller parts, or an empty string."""
    batches: list[tuple[Any, Count]] = field(default_factory=list)
    """The batches so far, with their `count`."""


def _change_nothing() -> str:
    """The last resort of a program that has none: no change, see `OutOfMemory.parts`."""
    return ""


class OutOfMemory:
    """Handles parts that run out of memory, by the policy. See `Healer.microbatches`.

    `BatchParts` has the parts. Every rank changes the size by the reports of all ranks, so that the
    size is equal on all ranks. The run's `RunRecord` has the size for the next process.

    Args:
        run: the parts of the run.

    Attributes:
        part: the current part, or None.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._answers = self.run.policy.answers(Cause.OOM)
        self._retries = retries_of(run, "a part of healer.microbatches")
        self._gradients = self.run.driver.window
        self._last_resort: Callable[[], str] = _change_nothing
        self.part: Microbatch[Any] | None = None
        self._window = _Window()
        self._was_used = False
        """Whether the loop has asked for the parts of a batch."""
        self._held: list[Any] = []
        """Values of the failed part that variables of the loop refer to."""
        self._joint = False
        """Whether several ranks repeat windows together."""
        self._joint_obstacle = ""
        """Reason why several ranks cannot repeat a window, or an empty string."""

    def parts(
        self,
        batch: Any,
        *,
        count: Count = None,
        split_obstacle: str = "",
        last_resort: Callable[[], str] = _change_nothing,
    ) -> Iterator[Microbatch[Any]]:
        """Yields the parts of a batch; see `Healer.microbatches`.

        The context manager of a part catches the exception of its body, which this generator does
        not see. The generator then begins again with the first batch since the last step.

        Args:
            batch: as for `Healer.microbatches`.
            count: as for `Healer.microbatches`.
            split_obstacle: reason why the run's batches cannot be split, or an empty string.
            last_resort: called if no smaller part is left. Reduces a step's memory and describes
                the change: the parts are then repeated. Returns "" without a change.

        Yields:
            The parts, in order.

        Raises:
            MicrobatchError: the loop has not entered a part.
            RunStopped: no smaller part fits, or the policy's budget is exhausted.
        """
        self._was_used = True
        self._last_resort = last_resort
        self.run.batch_parts.count = count
        self.run.batch_parts.obstacle = split_obstacle
        if self._begin(split_obstacle):
            self._try_larger(batch)
        batches = self._window.batches
        batches.append((batch, count))
        done = len(batches) - 1  # number of earlier batches of this window
        try:
            while True:
                for part in self._split(batches[done:], first=not done):
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
                    self._retries.report_success()
                    return
                self.part = None
                done = 0
                clear_cache = "clear_cache" in self._answers
                self._gradients.redo_window(self._held, clear_cache=clear_cache)
                self._held.clear()
                self.run.step_batches.forget_parts()
        finally:
            self.part = None

    def advice(self) -> str:
        """What a loop without `healer.microbatches` may write, or an empty string.

        Empty also for a policy that would not repeat the step in smaller parts.
        """
        if self._was_used or self.run.policy.observes or "shrink_microbatch" not in self._answers:
            return ""
        return (
            "If a batch has several samples, write `for part in healer.microbatches(batch)` around "
            "the forward and the backward pass: healcore then repeats the step in smaller parts"
        )

    def _begin(self, split_obstacle: str) -> bool:
        """Begins a new window, unless the current window still waits for its optimizer step.

        Returns whether a window begins.
        """
        accumulating = self._gradients.is_accumulating()
        if accumulating and self._window.batches and not self._gradients.has_stepped():
            return False
        self._window = _Window(split_obstacle, owns_gradients=not accumulating)
        self._gradients.begin_window()
        self._window.repeat_obstacle = split_obstacle or self._find_obstacle()
        return True

    def _try_larger(self, batch: Any) -> None:
        """Begins the window with larger parts, if it is time to try them, see `PartSize`.

        A try needs a window that can be repeated on every rank, and a first batch that is split
        into fewer parts than before on some rank. The ranks decide together, because all of them
        have the same size. They ask each other only when a try is due, which is the same step on
        all ranks.
        """
        step, size = self.run.progress.step, self.run.record.part_size
        larger = size.larger(step)
        if larger is None:
            return
        vote = not self._window.repeat_obstacle, self.run.batch_parts.gains_from(batch, larger)
        votes = [vote]
        if self._joint:
            votes = self.run.ranks.gather(vote)
        if all(can for can, _ in votes) and any(gains for _, gains in votes):
            size.grow(step, larger)
            self.run.log.info(f"step {step}: tries up to {larger} samples at a time again")
        else:
            size.since = step  # a smaller batch, or one that cannot be repeated, teaches nothing

    def _find_obstacle(self) -> str:
        """Reason why this window cannot be repeated in smaller parts, or an empty string."""
        if self.run.policy.observes:
            return 'this run only observes; in mode "heal" the rule of its policy for oom applies'
        if "shrink_microbatch" not in self._answers:
            return (
                f"policy {self.run.policy.name} has no rule for out of memory: add "
                'to = ["oom"], do = ["shrink_microbatch", "clear_cache"]'
            )
        if self.run.ranks.world > 1 and not self._joint and not self._joint_obstacle:
            obstacle = self._gradients.join_ranks(self.run.ranks)
            self._joint = not obstacle
            if obstacle:
                advice = "use smaller batches, and accumulate the gradients of more batches"
                self._joint_obstacle = f"{obstacle}; {advice}"
        if self._joint_obstacle or self._window.owns_gradients:
            return self._joint_obstacle
        return (
            "gradients existed before the first part of the batch, and a repeated step would "
            "discard them: compute these gradients within a part too, or call "
            "zero_grad(set_to_none=True) before the first part"
        )

    def _split(self, batches: list[tuple[Any, Count]], *, first: bool) -> Iterator[Microbatch[Any]]:
        """Yields the parts of some batches of the window; `first` is of the window's first part."""
        for number, (batch, count) in enumerate(batches, 1):
            parts = 1
            if not self._window.split_obstacle:
                parts = self.run.batch_parts.number(batch)
            pieces = split(batch, parts)
            # Drops parts without tokens: their mean loss is NaN, and so is 0 times NaN.
            weights = part_weights(pieces, count)
            pairs = [pair for pair in zip(pieces, weights, strict=True) if pair[1]]
            if self._joint:
                self._gradients.begin_parts()
            for i, (piece, weight) in enumerate(pairs, 1):
                ends = i == len(pairs)
                last = ends and number == len(batches)
                on_exit = partial(self._leave, batch, parts, ends)
                yield Microbatch(piece, weight, first, last, on_exit)
                first = False

    def _leave(self, batch: Any, parts: int, ends: bool, error: BaseException | None) -> bool:
        """Ends one of the `parts` of a batch. Returns whether to repeat the window.

        Raises RunStopped on every rank if there is no smaller part, and RankFailed if another
        rank's batch cannot be split.
        """
        overrun = None
        if error is not None:
            overrun = self._overrun(batch, parts, error)
            if overrun is None:
                return self._repeats_after(error)
        elif not (self._joint and ends):
            return False
        failed = self._failed_ranks(overrun, error)
        if not failed:
            return False
        if overrun is not None and error is not None and overrun.obstacle:
            error.add_note(f"{_NOT_TRIED}: {overrun.obstacle}")
            return False  # the exception propagates
        for rank, each in failed.items():
            if each.obstacle:
                raise RankFailed(f"rank {rank}: {each.line}; {_NOT_TRIED}: {each.obstacle}")
        # The smallest part that did not fit determines the size for all ranks.
        rank, smallest = min(failed.items(), key=lambda item: item[1].samples / item[1].parts)
        prefix = ""
        if self._joint:
            prefix = f"rank {', '.join(map(str, failed))}: "
        error = error or RankFailed(f"rank {rank}: {smallest.line}")
        self._shrink(smallest, error, prefix)
        self._held = clear_frames(error)
        return True

    def _repeats_after(self, error: BaseException) -> bool:
        """Whether to repeat the window after an exception that is not about memory.

        A transient failure of the network on one rank: with several ranks, the others would wait.
        """
        may_repeat = self.run.ranks.world == 1 and self._window.owns_gradients
        again = may_repeat and self._retries.wait_after(error)
        self._held = []
        if again:
            self._held = clear_frames(error)
        return again

    def _failed_ranks(
        self, overrun: _Overrun | None, error: BaseException | None
    ) -> dict[int, _Overrun]:
        """Rank -> its overrun, of the ranks whose part did not fit. Collective."""
        overruns = [overrun]
        if self._joint:
            if error is not None:
                clear_frames(error)  # the exchange needs a little memory
            some_failed = self._gradients.end_parts(overrun is not None)
            overruns = []
            if some_failed:
                overruns = self.run.ranks.gather(overrun)
        return {rank: each for rank, each in enumerate(overruns) if each is not None}

    def _overrun(self, batch: Any, parts: int, error: BaseException) -> _Overrun | None:
        """The part that did not fit into memory, or None if it failed for another reason."""
        fault = classify(error)
        if fault.cause is not Cause.OOM:
            return None
        samples = 0
        obstacle = self._window.repeat_obstacle
        if not obstacle:
            try:
                samples = count_samples(batch)
            except UnsplittableBatch as reason:
                obstacle = str(reason)
        line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if not obstacle and not self.run.record.part_size.is_tried:
            # A failed try keeps the profile of the failure before.
            line += f". {memory_text(self.run.driver, self.run.log)}"
        return _Overrun(samples, parts, fault, line, obstacle)

    def _shrink(self, overrun: _Overrun, error: BaseException, prefix: str) -> None:
        """Makes the parts smaller, and reports it. Raises RunStopped if there is no smaller part.

        A size that an earlier part of the run has had costs no budget.
        """
        fault, samples, parts = overrun.fault, overrun.samples, overrun.parts
        step, size = self.run.progress.step, self.run.record.part_size
        before = largest_part(samples, parts)
        after = largest_part(samples, min(2 * parts, samples))
        obstacle = self._obstacle_to_smaller(before, after)
        if obstacle:
            changed = self._last_resort()
            if not changed:
                self.run.stopping.stop(prefix + obstacle, error=error, fault=Cause.OOM)
            self.run.log.fault(step, fault, f"{prefix}{obstacle}: {changed}", answer="clear_cache")
            return
        self.run.record.shrinks += size.is_new(after)
        size.shrink(step, before, after)
        self.run.log.fault(
            step,
            fault,
            f"{prefix}a part of {before} samples (of {samples}) does not fit into memory, the step "
            f"is repeated with {after} at a time: {overrun.line}",
            answer="shrink_microbatch",
            samples=samples,
            size_before=before,
            size=after,
        )

    def _obstacle_to_smaller(self, before: int, after: int) -> str:
        """Reason why the parts may not become smaller, as a clause, or an empty string.

        `before` and `after` are samples of a part.
        """
        record, limit = self.run.record, self.run.policy.budget.shrinks
        if before == 1:
            return "a single sample does not fit into memory"
        if not record.part_size.is_new(after) or record.shrinks < limit:
            return ""
        return (
            f"{before} samples do not fit into memory, and the batch is not halved again: the "
            f"policy permits it {limit} times ([budget] shrinks)"
        )
