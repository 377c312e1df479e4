"""`Data`: the batches of a run, from its loaders to the steps that use them."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import MutableMapping, MutableSequence
from contextlib import nullcontext
from typing import Any, ParamSpec, TypeVar

from healcore.console import counted
from healcore.core.verdict import Cause
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.dominance.evidence import ObservedBatch
from healcore.runtime.driver import PendingDispatch
from healcore.runtime.faults import Fault, classify
from healcore.runtime.faults.retry import CallAttempt, Retries
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.steps import StepResult
from healcore.runtime.loop.run_settings import change_of_batch_size
from healcore.runtime.loop.termination import TerminationWatch
from healcore.runtime.recovery.record import HostParts, HostState, Record
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks

P = ParamSpec("P")
T = TypeVar("T")
_Skip = tuple[BatchId, Fault, Exception]
"""An unreadable batch that the policy skips, and why it cannot be read."""


class Data:
    """Reads batches, counts steps, and assigns batches to steps.

    `host` has the random generators that loaders draw from, and `record` the loaders' batch sizes.
    `keeps_batches` says whether weights are compared on the batches.

    Attributes:
        step: Steps done. A rollback decreases the number.
        steps_taken: Steps of this process, including steps that a rollback has undone.
        loader_exhausted: Whether the training loader is exhausted.
        had_completed: Whether the run in the store had completed, and this process has its last
            state.
    """

    def __init__(
        self,
        *,
        loaders: LoaderRegistry,
        host: HostState,
        policy: HostPolicy,
        ranks: Ranks,
        termination: TerminationWatch,
        log: RunLog,
        record: Record,
        keeps_batches: bool = False,
    ) -> None:
        self.loaders = loaders
        self.host = host
        self.step = self.steps_taken = 0
        self.loader_exhausted = self.had_completed = False
        self.passes = 0  # calls of `batches` in this process
        self._termination = termination
        self._log = log
        self._record = record
        self._policy = policy
        self._single_rank = ranks.world == 1
        self._reads = self._consecutive_failures = 0
        self._failed_reads: deque[int] = deque()  # among the last `[skip_batch] within`
        self._keeps_batches = keeps_batches
        self._loop_names_batches = False  # whether it calls `loss`, or `observe` with a batch
        self._last_ids: list[BatchId] = []  # of the last step's batches
        self._most = 1  # largest number of batches of a step so far
        self._current = 0  # number of the loader of the last batch
        # By number of the loader:
        self._ids: dict[int, list[BatchId]] = {}  # of the batches since the last step
        # The batches since the last step, if weights are compared; at most as many as a step has
        # had, because an evaluation takes no step.
        self._contents: dict[int, list[ObservedBatch]] = {}
        self._in_use: set[int] = set()  # the loop is still using their last batch
        self._last_batches: dict[int, Any] = {}  # with several ranks
        self._generators: HostParts | None = None  # of the checkpoint, until the first batch
        self._started_at = 0
        self._resumed = False

    def start(self, *, resumed: bool, completed_at: int | None = None) -> None:
        """Starts this process; `completed_at` is the step of a completed run in the store."""
        self._started_at, self._resumed = self.step, resumed
        self.had_completed = resumed and self.step == completed_at

    def restore(self, step: int, generators: HostParts | None) -> None:
        """Sets the step and the random states of an earlier process's checkpoint."""
        self.step, self._generators = step, generators
        self._restore_generators()

    @property
    def resumed_here(self) -> bool:
        """Whether this process has resumed a run and taken no step since."""
        return self._resumed and self.step == self._started_at

    # -- reading --------------------------------------------------------------------------------

    def count_pass(self) -> None:
        """Counts a call of `batches`, also for later processes."""
        self.passes += 1
        self._record.passes = max(self._record.passes, self.passes)

    @property
    def repeated(self) -> bool:
        """Whether the loop has repeated all passes of earlier processes.

        A loop that begins at an epoch of its own after a restart makes fewer passes.
        """
        return 0 < self.passes >= self._record.passes and self.loaders.at_epochs

    def begin(self, loader: Any, epochs: int | None, epoch: int | None = None) -> int:
        """Begins to iterate over a loader; returns the loader's number."""
        saved = self.loaders.has_saved(loader)
        if not saved:
            self._restore_generators()  # the loader began after the checkpoint
        number = self.loaders.begin(loader, epochs, epoch)
        if saved:
            self._restore_generators()
        before = {*self._record.settings}
        change = change_of_batch_size(self._record.settings, number, loader)
        if new := {n: v for n, v in self._record.settings.items() if n not in before}:
            self._log.event("data", step=self.step, outcome="a loader is read", settings=new)
        if change:
            self._log.problem(
                self.step,
                f"{change} (saved -> given): the loader continues at the same number of batches, "
                "which is another position in the data; to start from the first batch, pass an "
                "empty directory",
            )
        for line in self.loaders.notices:
            self._log.event("data", step=self.step, outcome=line)
            self._log.info(f"data: {line}")
        self.loaders.notices.clear()
        return number

    def next(self, number: int) -> Any:
        """Reads the next batch of a loader. Raises StopIteration after the last epoch."""
        alone = self._termination.waiting_for_data() if self.between_steps else nullcontext()
        with alone:
            batch, batch_id = self._read(number)
        self._current = number
        ids = self._ids.setdefault(number, [])
        ids.append(batch_id)
        self._generators = None
        if self._keeps_batches and not self._loop_names_batches and len(ids) <= self._most:
            self._contents.setdefault(number, []).append(ObservedBatch(batch))
        self._in_use.add(number)
        return batch

    def _read(self, number: int) -> tuple[Any, BatchId]:
        """The next readable batch and its id. Raises StopIteration after the last batch.

        With several ranks, the previous batch replaces an unreadable batch. After a skip this rank
        would end its epoch early, and the other ranks would wait for it.
        """
        skip: _Skip | None = None  # carried out once the loader has yielded the batch after it
        while True:
            self._reads += 1
            try:
                result = self.loaders.next(number)
            except Exception as error:
                if skip is not None and error is not skip[2]:
                    self._skip(number, skip)
                skip = self._skip_for(number, error)
                if skip is None:
                    raise
                if not self._single_rank:
                    self._skip(number, skip)
                    self.loaders[number].unreadable = None  # it counts as read
                    return _copied(self._last_batches[number]), skip[0]
            else:
                if skip is not None:
                    self._skip(number, skip)
                self._consecutive_failures = 0
                if not self._single_rank:
                    self._last_batches[number] = _copied(result[0])
                return result

    def _skip_for(self, number: int, error: Exception) -> _Skip | None:
        """The skip of a batch whose read has raised, or None if the error propagates."""
        batch = self.loaders[number].unreadable
        if batch is None or self._termination.signal_number is not None:
            return None  # no batch is at fault; a signal kills a loader's workers too
        fault = classify(error)
        skips = "skip_batch" in self._policy.answers(Cause.DATA)
        if not skips or fault.cause not in (Cause.DATA, Cause.UNKNOWN):
            return None
        limits, failed = self._policy.skip_batch, self._failed_reads
        in_a_row = self._consecutive_failures
        while failed and failed[0] <= self._reads - limits.within:
            failed.popleft()
        if in_a_row >= limits.consecutive or len(failed) >= limits.count:
            done = "skipped" if self._single_rank else "replaced by the batch before"
            error.add_note(
                f"healcore: {in_a_row} unreadable batches in a row and {len(failed)} within "
                f"{limits.within} were {done}, which is the limit of [skip_batch]"
            )
            return None
        if not self._single_rank and number not in self._last_batches:
            return None
        failed.append(self._reads)
        self._consecutive_failures += 1
        return batch, fault._replace(cause=Cause.DATA), error  # also an unknown error of a batch

    def _skip(self, number: int, skip: _Skip) -> None:
        """Skips the batch, unless another batch has replaced it, and logs the fault."""
        batch, fault, error = skip
        problem = f"{batch} cannot be read: {_one_line(error)}"
        if self._single_rank:
            self.loaders[number].left_out.add(batch)
        else:
            problem += "; the batch before comes again in its place"
        rows = batch.rows and [batch.rows]
        self._log.fault(
            self.step, fault, problem, answer="skip_batch", batches=[list(batch)], rows=rows
        )

    def release_batch(self, number: int) -> None:
        """Notes that the loop no longer uses its batch of a loader."""
        self._in_use.discard(number)

    def end(self, number: int) -> None:
        """Ends the loop over a loader that has no further batch."""
        if number == self.loaders.current:
            self.loader_exhausted = True
            if self.loaders.names_epochs:  # code after the epoch draws from here on
                self._generators = None
        else:  # an evaluation, whose batches belong to no step
            self._ids.pop(number, None)
            self._contents.pop(number, None)
        self.loaders.close(number)

    def at_last_batch(self, number: int | None) -> bool:
        """Whether the loop is using the last batch of this loader."""
        return number in self._in_use and self.loaders.at_end(number)

    def log_skipped(self, number: int) -> None:
        """Logs the batches that the loader has skipped since the last call."""
        if batches := [list(each) for each in self.loaders[number].skipped()]:
            self._log.event("skipped_batches", step=self.step, batches=batches)
            text = counted(len(batches), "batch", "batches")
            self._log.info(f"step {self.step}: {text} skipped")

    def retries(self, name: str) -> Retries:
        """The retries of a call under the run's policy."""
        return Retries(name, self._policy, self._report_attempt, self._termination.sleep)

    def _report_attempt(self, attempt: CallAttempt) -> None:
        step, number, text, wait = self.step, attempt.number, str(attempt), attempt.wait_s
        if attempt.fault is None:
            self._log.event("retried", step=step, attempt=number, why=text)
            self._log.info(text)
            return
        answer = None if wait is None else "retry"
        self._log.fault(step, attempt.fault, text, answer=answer, attempt=number, wait_s=wait)

    def _restore_generators(self) -> None:
        """Restores random states after a restart, because rewinding a loader draws from them.

        Called for each loader until the first batch.
        """
        if self._generators is not None:
            self.host.put_back(self._generators)

    # -- the batches of a step ------------------------------------------------------------------

    def observed(self, batch: Any, weight: float) -> bool:
        """Records a batch, or a part of it, whose loss is the result of `loss_fn`.

        Returns whether this is the first such batch.
        """
        if not self._keeps_batches:
            return False
        first, self._loop_names_batches = not self._loop_names_batches, True
        if first:
            self._contents.clear()
        self._contents.setdefault(self._current, []).append(ObservedBatch(batch, weight))
        return first

    def forget_parts(self) -> None:
        """Forgets the parts of batches since the last step, which come again in smaller parts."""
        if self._loop_names_batches:
            self._contents.clear()

    def take(self, pending: PendingDispatch) -> StepResult:
        """Counts the steps of a dispatch, with the batches of the last loader that yielded."""
        again = self._last_ids if self._current in self._in_use else []  # two updates on one batch
        self._last_ids = ids = self._ids.get(self._current, again)
        self._most = max(self._most, len(ids))
        self._ids.clear()  # a step may take batches of several loaders
        self.loaders.stepped(self._current, ids[-1] if ids else None)
        contents = tuple(self._contents.get(self._current, ()))
        self._contents.clear()
        first = StepResult(self.step, [], tuple(ids), contents)
        self.step += pending.count
        self.steps_taken += pending.count
        return first

    def on_rollback(self, target: int) -> None:
        """Forgets the batches of the steps from `target` on."""
        self.step = target
        self._ids.clear()
        self._last_ids = []
        self._contents.clear()

    @property
    def between_steps(self) -> bool:
        """Whether no batch was read since the last step: state and loader positions match."""
        return not self.unused

    @property
    def unused(self) -> tuple[BatchId, ...]:
        """Ids of the current loader's batches since the last step."""
        return tuple(self._ids.get(self._current, ()))

    @property
    def waiting(self) -> dict[int, BatchId]:
        """Number of a loader -> its first batch since the last step."""
        return {number: ids[0] for number, ids in self._ids.items() if ids}

    @property
    def skipped_steps(self) -> int:
        """Approximate number of steps whose batches rollbacks have skipped."""
        skipped = sum(map(len, self.loaders.left_out().values()))
        return skipped // max(1, len(self._last_ids))


def _one_line(error: Exception) -> str:
    """An exception in one line; torch puts the traceback of a loader's worker into its message."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return " ... ".join(dict.fromkeys((lines[0][:300], lines[-1][:300])))


def _copied(batch: Any) -> Any:
    """A shallow copy of a mutable batch, from which the loop may remove entries."""
    return copy.copy(batch) if isinstance(batch, MutableMapping | MutableSequence) else batch
