"""`OutOfMemory`: repeats a step in smaller parts, or stops with a diagnosis, if memory runs out.

A step of one rank is also repeated, unchanged, after a transient failure in the network.

A *window* is all batches since the last optimizer step, whose gradients add up:

    parts(batch) --> part, part, ...        each is a context manager around a forward pass
                       | memory runs out in one of them, on any rank
                       v
    parts of half the size, gradients back to the start of the window, its first batch again

The number of parts is a power of two, so that a compiled step sees few shapes. A comparison of
weights evaluates the parts that a step trains on: a whole batch would run out of memory again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import ConfigDict, Field, NonNegativeInt

from healcore.core.decision import Cause
from healcore.events.log import process_path
from healcore.runtime.faults.classification import Fault, classify
from healcore.runtime.faults.microbatches import (
    Count,
    Microbatch,
    MicrobatchError,
    UnsplittableBatch,
    clear_frames,
    count_samples,
    weighted_parts,
)
from healcore.runtime.faults.retry import Retries
from healcore.runtime.store import files
from healcore.runtime.store.ranks import RankFailed

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

GOOD_STEPS = 100
"""Steps after a change of the size until parts twice as large are tried."""
_NOT_TRIED = "healcore has not tried smaller parts of the batch"


@dataclass
class PartSize:
    """Largest number of samples of a part. It is halved when memory runs out.

    Memory may run out in one step of thousands, because of one long sequence or of another program
    on the device. Parts that stay small after such a step cost time until the end of the run. So
    after `GOOD_STEPS` steps, parts twice as large are tried, each size once.

    Its values are a part of the run's record and depend on the number of the step, never on the
    clock. A comparison of weights follows the same rule.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")
    limit: Annotated[int, Field(ge=1)] | None = None
    """Samples of a part, or None while all batches have fitted."""
    since: NonNegativeInt = 0
    """Step at which the size has last changed."""
    tried: NonNegativeInt = 0
    """Largest size that was tried again, or 0."""

    def grow(self, step: int) -> bool:
        """Takes the next larger size at a step, if it is time to try it. Returns whether it is."""
        size = 2 * (self.limit or 0)
        if size <= self.tried or step < self.since + GOOD_STEPS:
            return False
        self.limit = self.tried = size
        self.since = step
        return True


class _Overrun(NamedTuple):
    """A part that did not fit into memory."""

    size: int
    """Samples of the largest part of the batch; 0 if smaller parts are impossible."""
    parts: int
    """Number of parts that the batch was split into."""
    fault: Fault
    """The classified exception."""
    line: str
    """First line of the exception."""
    obstacle: str
    """Reason why smaller parts are impossible, or an empty string."""


class OutOfMemory:
    """Handles parts that run out of memory, by the policy. See `Healer.microbatches`.

    Every rank changes the size by the reports of all ranks. The run's `RunRecord` has the size for
    the next process.

    Args:
        run: the parts of the run.

    Attributes:
        part: the current part, or None.
        to_split: makes of a batch of the `loss_fn` what is split and counted, for a trainer whose
            batches have another order of rows.
        to_evaluate_from: makes of a part of it a batch of the `loss_fn`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.part: Microbatch[Any] | None = None
        self.to_split: Callable[[Any], Any] = lambda batch: batch
        self.to_evaluate_from: Callable[[Any], Any] = lambda part: part
        self._count: Count = None
        """What the loss of the newest batch averages over."""
        self._split_obstacle = ""
        """Reason why the run's batches cannot be split, or an empty string."""
        self._last_resort: Callable[[], str] = str
        self._retries = Retries("a part of healer.microbatches", run.policy, run)
        self._window: list[tuple[Any, Count]] = []
        """The batches since the last optimizer step, with their `count`."""
        self._has_others = False
        """Whether gradients existed before the window, which a repeat would discard."""
        self._obstacle = ""
        """Reason why the window cannot be repeated in smaller parts, or an empty string."""
        self._held: list[Any] = []
        """Values of the failed part that variables of the loop refer to."""
        self._joins: str | None = None
        """Reason why several ranks cannot repeat a window, empty if they repeat windows together,
        or None for one rank, and before the first window."""

    # -- the parts of a batch -------------------------------------------------------------------

    def number(self, batch: Any, least: int = 1) -> int:
        """The number of parts in which a step trains on a batch.

        It is 1 while memory suffices, and otherwise the smallest power of two, or one part a
        sample, with which no part exceeds the size that fits.

        Args:
            batch: a batch of the loop. A batch that cannot be split has one part.
            least: min number of parts, unless the batch has fewer samples.
        """
        limit, samples = self.run.record.part_size.limit, self._samples(batch)
        parts = min(least, samples)
        while limit is not None and _largest(samples, parts) > limit:
            parts = min(2 * parts, samples)
        return parts

    def to_evaluate(self, batch: Any, least: int) -> list[tuple[Any, float]]:
        """The parts in which the `loss_fn` evaluates a batch, with their weights.

        Args:
            batch: a batch of the `loss_fn`.
            least: see `number`.
        """
        form = self.to_split(batch)
        parts = self.number(form, least)
        if parts == 1:
            return [(batch, 1.0)]
        weighted = weighted_parts(form, parts, self._count)
        return [(self.to_evaluate_from(piece), weight) for piece, weight in weighted]

    def divisible_parts(self, batch: Any, least: int) -> int:
        """The number of parts of `to_evaluate`, or 0 if they cannot be halved.

        Args:
            batch: a batch of the `loss_fn`.
            least: see `number`.
        """
        form = self.to_split(batch)
        parts = self.number(form, least)
        if parts < self._samples(form):
            return parts
        return 0

    def _samples(self, batch: Any) -> int:
        """Number of samples of a batch, or 1 if it cannot be split: the whole batch may fit."""
        try:
            if self._split_obstacle:
                return 1
            return max(count_samples(batch), 1)
        except UnsplittableBatch:
            return 1

    # -- the loop over the parts ----------------------------------------------------------------

    def parts(
        self,
        batch: Any,
        *,
        count: Count = None,
        split_obstacle: str = "",
        last_resort: Callable[[], str] = str,
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
        run, gradients = self.run, self.run.driver.window
        self._count, self._split_obstacle, self._last_resort = count, split_obstacle, last_resort
        accumulates = gradients.is_accumulating()
        if not (accumulates and self._window and not gradients.has_stepped()):
            self._window, self._has_others = [], accumulates
            gradients.begin_window()
            self._obstacle = split_obstacle or self._find_obstacle()
            step, size = run.progress.step, run.record.part_size
            # A batch that fits whole would teach nothing, and a window must be repeatable.
            if not self._obstacle and self.number(batch) > 1 and size.grow(step):
                run.log.info(f"step {step}: tries up to {size.limit} samples at a time again")
        self._window.append((batch, count))
        done = len(self._window) - 1  # number of earlier batches of this window
        try:
            while True:
                for part in self._parts_from(done):
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
                    self._retries.failed = 0
                    return
                done = 0
                clear_cache = "clear_cache" in run.policy.answers(Cause.OOM)
                gradients.redo_window(self._held, clear_cache=clear_cache)
                run.step_batches.forget_parts()
        finally:
            self.part = None

    def _find_obstacle(self) -> str:
        """Reason why this window cannot be repeated in smaller parts, or an empty string."""
        run = self.run
        if "shrink_microbatch" not in run.policy.answers(Cause.OOM):
            return (
                f"policy {run.policy.name} only observes, or has no rule for out of memory: add "
                'to = ["oom"], do = ["shrink_microbatch", "clear_cache"]'
            )
        if run.ranks.world > 1 and self._joins is None:
            self._joins = run.driver.window.join_ranks(run.ranks)
        if self._joins:
            return f"{self._joins}; use smaller batches, and accumulate the gradients of more"
        if self._has_others:
            return (
                "gradients existed before the first part of the batch, and a repeated step would "
                "discard them: compute these gradients within a part too, or call "
                "zero_grad(set_to_none=True) before the first part"
            )
        return ""

    def _parts_from(self, done: int) -> Iterator[Microbatch[Any]]:
        """Yields the parts of the batches of the window, after the first `done` batches."""
        first, batches = not done, self._window[done:]
        for number, (batch, count) in enumerate(batches, 1):
            parts = self.number(batch)
            pairs = weighted_parts(batch, parts, count)
            if self._joins == "":
                self.run.driver.window.begin_parts()
            for i, (piece, weight) in enumerate(pairs, 1):
                ends = i == len(pairs)
                on_exit = partial(self._leave, batch, parts, ends)
                yield Microbatch(piece, weight, first, ends and number == len(batches), on_exit)
                first = False

    def _leave(self, batch: Any, parts: int, ends: bool, error: BaseException | None) -> bool:
        """Ends one of the `parts` of a batch. Returns whether to repeat the window.

        Raises RunStopped on every rank if there is no smaller part, and RankFailed if another
        rank's batch cannot be split.
        """
        mine, run = None, self.run
        if error is not None:
            fault = classify(error)
            if fault.cause is not Cause.OOM:  # other ranks would wait during a retry
                may_repeat = run.ranks.world == 1 and not self._has_others
                if not (may_repeat and self._retries.wait_after(error)):
                    return False
                self._held = clear_frames(error)
                return True
            mine = self._overrun(batch, parts, fault, error)
        of_ranks: list[_Overrun | None] = [mine]
        if self._joins == "" and (mine is not None or ends):
            if error is not None:
                clear_frames(error)  # the exchange needs a little memory
            some_failed = run.driver.window.end_parts(mine is not None)
            if some_failed:
                of_ranks = run.ranks.gather(mine)
            else:
                of_ranks = []
        failed = {rank: each for rank, each in enumerate(of_ranks) if each is not None}
        if not failed:
            return False
        if mine is not None and error is not None and mine.obstacle:
            error.add_note(f"{_NOT_TRIED}: {mine.obstacle}")
            return False  # the exception propagates
        for rank, each in failed.items():
            if each.obstacle:
                raise RankFailed(f"rank {rank}: {each.line}; {_NOT_TRIED}: {each.obstacle}")
        # The smallest part that did not fit determines the size for all ranks.
        rank, smallest = min(failed.items(), key=lambda item: item[1].size)
        error = error or RankFailed(f"rank {rank}: {smallest.line}")
        if self._joins == "":
            prefix = f"rank {', '.join(map(str, failed))}: "
        else:
            prefix = ""
        self._shrink(smallest, error, prefix)
        self._held = clear_frames(error)
        return True

    def _overrun(self, batch: Any, parts: int, fault: Fault, error: BaseException) -> _Overrun:
        """What is known of a part that did not fit into memory."""
        size, obstacle = 0, self._obstacle
        if not obstacle:
            try:
                size = _largest(count_samples(batch), parts)
            except UnsplittableBatch as reason:
                obstacle = str(reason)
        line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if not (obstacle or self.run.record.part_size.tried):
            # A failed try keeps the profile of the failure before.
            line += f"; {memory_text(self.run)}"
        return _Overrun(size, parts, fault, line, obstacle)

    def _shrink(self, overrun: _Overrun, error: BaseException, prefix: str) -> None:
        """Halves the parts, and reports it. Raises RunStopped if there is no smaller part."""
        run, step, before = self.run, self.run.progress.step, overrun.size
        limit, why = run.policy.budget.shrinks, ""
        if before <= 1:
            why = "a single sample does not fit into memory"
        elif overrun.parts >= 2**limit:
            why = (
                f"{before} samples do not fit into memory, and the batch is not halved again: the "
                f"policy permits it {limit} times ([budget] shrinks)"
            )
        if why:
            changed = self._last_resort()
            if not changed:
                run.stopping.stop(prefix + why, error=error, fault=Cause.OOM)
            line = f"{prefix}{why}: {changed}"
            run.log.fault(step, overrun.fault, line, answer="clear_cache")
            return
        after = _largest(before, 2)
        run.record.shrinks += 1
        run.record.part_size.limit, run.record.part_size.since = after, step
        run.log.fault(
            step,
            overrun.fault,
            f"{prefix}a part of {before} samples does not fit into memory, the step is repeated "
            f"with {after} at a time: {overrun.line}",
            answer="shrink_microbatch",
            size_before=before,
            size=after,
        )


def _largest(samples: int, parts: int) -> int:
    """Samples of the largest part of a batch that is split evenly: the quotient, rounded up."""
    return -(-samples // parts)


def memory_text(run: Run) -> str:
    """Writes the memory profile next to the events, and names the file.

    Args:
        run: the parts of the run. Its events have a path on rank 0 only, which writes the file. The
            file of a later failure of the same process replaces it.

    Returns:
        A clause with the name of the file, or why there is none.
    """
    events = run.log.events
    if events.path is None:
        return "no memory profile without a file of events"
    try:
        suffix, content = run.driver.memory_profile()
        path = process_path(events.path, events.process_id, "memory", suffix)
        files.replace(path, content)
    except Exception as error:  # the disk is full, or the device may fail again
        return f"no memory profile: {type(error).__name__}: {error:.100}"
    return f"memory profile: {path.name}"
