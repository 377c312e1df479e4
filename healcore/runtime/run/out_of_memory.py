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
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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
)
from healcore.runtime.faults.retry import Retries
from healcore.runtime.run.batch_parts import largest_part
from healcore.runtime.store import files
from healcore.runtime.store.ranks import RankFailed

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_NOT_TRIED = "healcore has not tried smaller parts of the batch"
_MAX_PROFILE_BYTES = 16 << 20
"""A larger profile is not written: a snapshot grows with the recorded history."""


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
        self.part: Microbatch[Any] | None = None
        self._answers = run.policy.answers(Cause.OOM)
        self._retries = Retries("a part of healer.microbatches", run.policy, run)
        self._gradients = run.driver.window
        self._last_resort: Callable[[], str] = str
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
        self._last_resort = last_resort
        self.run.batch_parts.count = count
        self.run.batch_parts.obstacle = split_obstacle
        accumulates = self._gradients.is_accumulating()
        if not (accumulates and self._window and not self._gradients.has_stepped()):
            self._window, self._has_others = [], accumulates
            self._gradients.begin_window()
            self._obstacle = split_obstacle or self._find_obstacle()
            self._try_larger(batch)
        self._window.append((batch, count))
        done = len(self._window) - 1  # number of earlier batches of this window
        try:
            while True:
                for part in self._parts_of(self._window[done:], first=not done):
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

    def _find_obstacle(self) -> str:
        """Reason why this window cannot be repeated in smaller parts, or an empty string."""
        if self.run.policy.observes:
            return 'this run only observes; in mode "heal" the rule of its policy for oom applies'
        if "shrink_microbatch" not in self._answers:
            return (
                f"policy {self.run.policy.name} has no rule for out of memory: add "
                'to = ["oom"], do = ["shrink_microbatch", "clear_cache"]'
            )
        if self.run.ranks.world > 1 and self._joins is None:
            self._joins = self._gradients.join_ranks(self.run.ranks)
        if self._joins:
            return f"{self._joins}; use smaller batches, and accumulate the gradients of more"
        if self._has_others:
            return (
                "gradients existed before the first part of the batch, and a repeated step would "
                "discard them: compute these gradients within a part too, or call "
                "zero_grad(set_to_none=True) before the first part"
            )
        return ""

    def _try_larger(self, batch: Any) -> None:
        """Begins the window with larger parts, if it is time to try them, see `PartSize`.

        A try needs a window that can be repeated and a batch that is split, on every rank. The
        ranks ask each other only when a try is due, which is the same step on all ranks.
        """
        step, size = self.run.progress.step, self.run.record.part_size
        larger = size.larger(step)
        if larger is None:
            return
        votes = [not self._obstacle and self.run.batch_parts.number(batch) > 1]
        if self._joins == "":
            votes = self.run.ranks.gather(votes[0])
        if all(votes):
            size.grow(step, larger)
            self.run.log.info(f"step {step}: tries up to {larger} samples at a time again")
        else:
            size.since = step  # a smaller batch, or one that cannot be repeated, teaches nothing

    def _parts_of(
        self, batches: list[tuple[Any, Count]], *, first: bool
    ) -> Iterator[Microbatch[Any]]:
        """Yields the parts of some batches of the window; `first` is of the window's first part."""
        for number, (batch, count) in enumerate(batches, 1):
            parts = self.run.batch_parts.number(batch)
            pairs = self.run.batch_parts.of_step(batch, count)
            if self._joins == "":
                self._gradients.begin_parts()
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
        mine = None
        if error is not None:
            fault = classify(error)
            if fault.cause is not Cause.OOM:
                return self._repeats_after(error)
            mine = self._overrun(batch, parts, fault, error)
        of_ranks = [mine]
        if self._joins == "" and (mine is not None or ends):
            if error is not None:
                clear_frames(error)  # the exchange needs a little memory
            some_failed = self._gradients.end_parts(mine is not None)
            of_ranks = self.run.ranks.gather(mine) if some_failed else []
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
        rank, smallest = min(failed.items(), key=lambda item: item[1].samples / item[1].parts)
        error = error or RankFailed(f"rank {rank}: {smallest.line}")
        prefix = f"rank {', '.join(map(str, failed))}: " if self._joins == "" else ""
        self._shrink(smallest, error, prefix)
        self._held = clear_frames(error)
        return True

    def _repeats_after(self, error: BaseException) -> bool:
        """Whether to repeat the window after an exception that is not about memory.

        A transient failure of the network on one rank: with several ranks, the others would wait.
        """
        self._held = []
        may_repeat = self.run.ranks.world == 1 and not self._has_others
        again = may_repeat and self._retries.wait_after(error)
        if again:
            self._held = clear_frames(error)
        return again

    def _overrun(self, batch: Any, parts: int, fault: Fault, error: BaseException) -> _Overrun:
        """What is known of a part that did not fit into memory."""
        samples, obstacle = 0, self._obstacle
        if not obstacle:
            try:
                samples = count_samples(batch)
            except UnsplittableBatch as reason:
                obstacle = str(reason)
        line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if not obstacle and not self.run.record.part_size.is_tried:
            # A failed try keeps the profile of the failure before.
            line += f". {memory_text(self.run)}"
        return _Overrun(samples, parts, fault, line, obstacle)

    def _shrink(self, overrun: _Overrun, error: BaseException, prefix: str) -> None:
        """Makes the parts smaller, and reports it. Raises RunStopped if there is no smaller part.

        A size that an earlier part of the run has had costs no budget.
        """
        run, step, samples = self.run, self.run.progress.step, overrun.samples
        size, limit = run.record.part_size, run.policy.budget.shrinks
        before = largest_part(samples, overrun.parts)
        after = largest_part(samples, min(2 * overrun.parts, samples))
        why = ""
        if before == 1:
            why = "a single sample does not fit into memory"
        elif size.is_new(after) and run.record.shrinks >= limit:
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
        run.record.shrinks += size.is_new(after)
        size.shrink(step, before, after)
        run.log.fault(
            step,
            overrun.fault,
            f"{prefix}a part of {before} samples (of {samples}) does not fit into memory, the step "
            f"is repeated with {after} at a time: {overrun.line}",
            answer="shrink_microbatch",
            samples=samples,
            size_before=before,
            size=after,
        )


def memory_text(run: Run) -> str:
    """Writes the memory profiles next to the events, and describes them: what holds the memory.

    Args:
        run: the parts of the run. Its events have a path on rank 0 only, which writes the files.

    Returns:
        A sentence about what holds most of the memory, and the names of the files. A failure to
        measure is a sentence too: the device may have failed.
    """
    text, events = "The owners of the memory are not known", run.log.events  # as in JAX
    try:
        sizes = run.driver.memory()
        if sizes:
            owner = max(sizes, key=sizes.__getitem__)
            total = sum(sizes.values())
            text = f"Largest owner of memory: {owner} ({sizes[owner]:,} of {total:,} bytes)"
        if events.path is None:
            return text
        profiles = run.driver.memory_profiles()
        if sizes:
            owners = "".join(f"{size:>20,} bytes  {name}\n" for name, size in sizes.items())
            profiles[".txt"] = owners.encode() + b"\n" + profiles.get(".txt", b"")
        names = []
        # The files of a later failure of the same process replace these.
        for suffix, content in sorted(profiles.items()):
            if len(content) <= _MAX_PROFILE_BYTES:
                path = process_path(events.path, events.process_id, "memory", suffix)
                files.replace(path, content)
                names.append(path.name)
    except Exception as error:  # the disk is full, or the device may fail again
        return f"{text}; no memory profile: {type(error).__name__}: {error:.100}"
    return f"{text}; memory profile: {', '.join(names)}" if names else text
