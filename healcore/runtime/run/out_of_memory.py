"""`OutOfMemory`: repeats a step in smaller parts, or stops with a diagnosis, if memory runs out.

A step of one rank is also repeated, unchanged, after a transient failure in the network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from healcore.core.decision import Cause
from healcore.runtime.faults.failures import Fault, classify
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
from healcore.runtime.run.recovery import Recovery
from healcore.runtime.store.ranks import RankFailed

_NOT_TRIED = "healcore has not tried smaller parts of the batch"


class _Overrun(NamedTuple):
    """A part that did not fit into memory."""

    samples: int  # of the part's batch; 0 if smaller parts are impossible
    parts: int  # number of parts that the batch was split into
    fault: Fault
    line: str  # first line of the exception
    obstacle: str  # reason why smaller parts are impossible, or an empty string


class OutOfMemory:
    """Handles parts that run out of memory, by the policy. See `Healer.microbatches`.

    The parts of a batch are halved, and never grow again. Their number is a power of two, so that a
    compiled step sees few shapes. Every rank changes the size by the reports of all ranks, so that
    the size is equal on all ranks. The run's `RunRecord` has it for the next process.

    Attributes:
        part: the current part, or None.
    """

    def __init__(self, recovery: Recovery) -> None:
        self._recovery, self._context, self._data = recovery, recovery.context, recovery.data
        self._answers = self._context.policy.answers(Cause.OOM)
        self._retries = self._data.retries("a part of healer.microbatches")
        self._gradients = self._context.driver.window
        self._last_resort: Callable[[], str] = str
        self.part: Microbatch[Any] | None = None
        self._batches: list[tuple[Any, Count]] = []  # since the last step, with their `count`
        self._split_obstacle = ""  # reason why the run's batches cannot be split, or ""
        self._repeat_obstacle = ""  # reason why the window cannot be repeated in smaller parts
        self._owns_gradients = True  # whether all gradients come from the parts of this window
        self._held: list[Any] = []  # values of the failed part that variables of the loop refer to
        self._joint: Any = None  # torch's `DDPGradients`, or None if each rank decides alone
        self._joint_obstacle = ""  # reason why several ranks cannot repeat a window, or ""

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
        """
        self._last_resort = last_resort
        self._begin(split_obstacle)
        self._batches.append((batch, count))
        done = len(self._batches) - 1  # number of earlier batches of this window
        try:
            while True:
                for part in self._split(self._batches[done:], first=not done):
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
                self._data.forget_parts()
        finally:
            self.part = None

    def largest_owner(self) -> str:
        """A sentence about what holds most of the memory."""
        try:
            sizes = self._context.driver.memory()
        except Exception as error:  # the device may fail again
            return f"The memory could not be measured: {type(error).__name__}: {error:.100}"
        owner, total = max(sizes, key=sizes.__getitem__), sum(sizes.values())
        return f"Largest owner of memory: {owner} ({sizes[owner]:,} of {total:,} bytes)"

    def _begin(self, split_obstacle: str) -> None:
        """Begins a new window, unless the current window still waits for its optimizer step."""
        accumulating = self._gradients.is_accumulating()
        if accumulating and self._batches and not self._gradients.has_stepped():
            return
        self._batches.clear()
        self._gradients.begin_window()
        self._owns_gradients = not accumulating
        self._split_obstacle = split_obstacle
        self._repeat_obstacle = split_obstacle or self._find_obstacle()

    def _find_obstacle(self) -> str:
        """Reason why this window cannot be repeated in smaller parts, or an empty string."""
        if self._context.policy.observes:
            return "the policy only observes"
        if "shrink_microbatch" not in self._answers:
            return (
                f"policy {self._context.policy.name} has no rule for out of memory: add "
                'to = ["oom"], do = ["shrink_microbatch", "clear_cache"]'
            )
        if self._context.ranks.world > 1 and self._joint is None and not self._joint_obstacle:
            joint = self._gradients.between_ranks(self._context.ranks)
            if isinstance(joint, str):
                advice = "use smaller batches, and accumulate the gradients of more batches"
                self._joint_obstacle = f"{joint}; {advice}"
            else:
                self._joint = joint
        if self._joint_obstacle or self._owns_gradients:
            return self._joint_obstacle
        return (
            "gradients existed before the first part of the batch, and a repeated step would "
            "discard them: compute these gradients within a part too, or call "
            "zero_grad(set_to_none=True) before the first part"
        )

    def _split(self, batches: list[tuple[Any, Count]], *, first: bool) -> Iterator[Microbatch[Any]]:
        for number, (batch, count) in enumerate(batches, 1):
            parts = self._number_of_parts(batch)
            pieces = split(batch, parts)
            # Drops parts without tokens: their mean loss is NaN, and so is 0 times NaN.
            weights = part_weights(pieces, count)
            pairs = [pair for pair in zip(pieces, weights, strict=True) if pair[1]]
            if self._joint is not None:
                self._joint.begin_batch(first=first)
            for i, (piece, weight) in enumerate(pairs, 1):
                ends = i == len(pairs)
                last = ends and number == len(batches)
                on_exit = partial(self._leave, batch, parts, ends)
                yield Microbatch(piece, weight, first, last, on_exit)
                first = False

    def _number_of_parts(self, batch: Any) -> int:
        limit = self._context.record.part_limit
        if limit is None or self._split_obstacle:
            return 1
        try:
            samples = count_samples(batch)
        except UnsplittableBatch:
            return 1  # the whole batch may fit
        parts = 1
        while -(-samples // parts) > limit:
            parts = min(2 * parts, samples)
        return parts

    def _leave(self, batch: Any, parts: int, ends: bool, error: BaseException | None) -> bool:
        """Ends one of the `parts` of a batch. Returns whether to repeat the window.

        Raises RunStopped on every rank if there is no smaller part, and RankFailed if another
        rank's batch cannot be split.
        """
        overrun = None if error is None else self._overrun(batch, parts, error)
        if error is not None and overrun is None:
            # With several ranks, the other ranks would wait.
            alone = self._context.ranks.world == 1 and self._owns_gradients
            again = alone and self._retries.wait_after(error)
            self._held = clear_frames(error) if again else []
            return again
        if error is None and (self._joint is None or not ends):
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
        prefix = "" if self._joint is None else f"rank {', '.join(map(str, failed))}: "
        error = error or RankFailed(f"rank {rank}: {smallest.line}")
        self._shrink(smallest, error, prefix)
        self._held = clear_frames(error)
        return True

    def _failed_ranks(
        self, overrun: _Overrun | None, error: BaseException | None
    ) -> dict[int, _Overrun]:
        """Rank -> its overrun, of the ranks whose part did not fit. Collective."""
        overruns = [overrun]
        if self._joint is not None:
            if error is not None:
                clear_frames(error)  # the exchange needs a little memory
            some = self._joint.end_batch(overrun is not None)
            overruns = self._context.ranks.gather(overrun) if some else []
        return {rank: each for rank, each in enumerate(overruns) if each is not None}

    def _overrun(self, batch: Any, parts: int, error: BaseException) -> _Overrun | None:
        """The part that did not fit into memory, or None if it failed for another reason."""
        fault = classify(error)
        if fault.cause is not Cause.OOM:
            return None
        samples = 0
        obstacle = self._repeat_obstacle
        if not obstacle:
            try:
                samples = count_samples(batch)
            except UnsplittableBatch as reason:
                obstacle = str(reason)
        line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if not obstacle:
            line += f". {self.largest_owner()}"
        return _Overrun(samples, parts, fault, line, obstacle)

    def _shrink(self, overrun: _Overrun, error: BaseException, prefix: str) -> None:
        """Halves the parts, and reports it. Raises RunStopped if there is no smaller part."""
        fault, samples, parts = overrun.fault, overrun.samples, overrun.parts
        step, record = self._data.step, self._context.record
        limit = self._context.policy.budget.shrinks
        before = -(-samples // parts)
        why = ""
        if before == 1:
            why = "a single sample does not fit into memory"
        elif record.shrinks >= limit:
            why = (
                f"{before} samples do not fit into memory, and the batch is not halved again: the "
                f"policy permits it {limit} times ([budget] shrinks)"
            )
        if why:
            changed = self._last_resort()
            if not changed:
                self._recovery.stop(prefix + why, error, Cause.OOM)
            self._context.log.fault(step, fault, f"{prefix}{why}: {changed}", answer="clear_cache")
            return
        record.shrinks += 1
        record.part_limit = -(-samples // min(2 * parts, samples))
        self._context.log.fault(
            step,
            fault,
            f"{prefix}{before} of {samples} samples do not fit into memory, the step is repeated "
            f"with {record.part_limit} at a time: {overrun.line}",
            answer="shrink_microbatch",
            samples=samples,
            size_before=before,
            size=record.part_limit,
        )
