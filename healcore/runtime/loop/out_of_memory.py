"""`OutOfMemory`: repeats a step in smaller parts, or stops with a diagnosis, if memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from healcore.core.verdict import Cause, names
from healcore.runtime.driver import Driver
from healcore.runtime.faults import Fault, classify
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.loop.data import Data
from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes
from healcore.runtime.microbatches.splitting import UnsplittableBatch, count_samples
from healcore.runtime.microbatches.window import (
    AccumulationWindow,
    Failure,
    Synchronization,
    released,
)
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import RankFailed, Ranks

_NOT_TRIED = "healcore has not tried smaller parts of the batch"


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
        self.sizes = MicrobatchSizes(shrinks=policy.shrinks)
        self._gradients = driver.gradient_window()
        self._ranks_obstacle = ""
        """Reason why the ranks cannot redo a window together, or an empty string."""
        self.window = AccumulationWindow(
            self._gradients,
            self.sizes,
            decide=self._decide,
            on_redo=data.forget_parts,
            clear_cache="clear_cache" in self._answers,
            synchronize=self._synchronize,
        )

    def resume(self) -> None:
        """Loads the sizes that an earlier process has saved."""
        saved = self._recovery.restorer.record.microbatches
        if saved is not None:
            self.sizes.load(saved)

    def _synchronize(self) -> Synchronization | None:
        """The synchronization of all ranks, or None if each rank decides alone."""
        if self._ranks.world == 1 or self._policy_obstacle():
            return None
        result = self._gradients.between_ranks(self._ranks)
        self._ranks_obstacle = result if isinstance(result, str) else ""
        return None if isinstance(result, str) else result

    def _decide(self, failure: Failure | None) -> bool:
        """Whether to redo the window after a failed part, or after the last part of a batch.

        Raises RunStopped on every rank if there is no smaller part, and RankFailed if another
        rank's batch cannot be split.
        """
        overrun = None if failure is None else self._overrun(failure)
        error = None if failure is None else failure.error
        synchronization = self.window.synchronization
        if error is not None and overrun is None:
            return False  # another kind of exception
        if error is not None and synchronization is not None:
            released(error)  # the exchange needs a little memory
        if synchronization is None:
            overruns = [overrun]
        elif synchronization.any_failed(overrun is not None):
            overruns = self._ranks.gather(overrun)
        else:
            synchronization.reduce()
            return False
        if overrun is not None and overrun.why_not:
            assert error is not None
            error.add_note(f"{_NOT_TRIED}: {overrun.why_not}")
            return False  # the exception propagates
        failed = {rank: each for rank, each in enumerate(overruns) if each is not None}
        for rank, each in failed.items():
            if each.why_not:
                raise RankFailed(f"rank {rank}: {each.line}; {_NOT_TRIED}: {each.why_not}")
        # The smallest part that did not fit determines the size for all ranks.
        rank, smallest = min(failed.items(), key=lambda item: item[1].samples / item[1].parts)
        prefix = "" if synchronization is None else f"rank {', '.join(map(str, failed))}: "
        self._shrink(smallest, error or RankFailed(f"rank {rank}: {smallest.line}"), prefix)
        return True

    def _overrun(self, failure: Failure) -> _Overrun | None:
        """The part that did not fit into memory, or None if it failed for another reason."""
        fault = classify(failure.error)
        if fault.cause is not Cause.OOM or not isinstance(failure.error, Exception):
            return None
        samples, why_not = 0, self._obstacle(failure)
        if not why_not:
            try:
                samples = count_samples(failure.batch)
            except UnsplittableBatch as reason:
                why_not = str(reason)
        line = f"{type(failure.error).__name__}: {failure.error}".splitlines()[0][:300]
        return _Overrun(samples, failure.parts, fault.sign, line, why_not)

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

    def _shrink(self, overrun: _Overrun, error: BaseException, rank: str) -> None:
        """Halves the parts, and reports it. Raises RunStopped if there is no smaller part."""
        step, fault = self._data.step, Fault(Cause.OOM, overrun.sign)
        try:
            resize = self.sizes.shrink(overrun.samples, overrun.parts)
        except CannotShrink as reason:
            changed = "" if self.last_resort is None else self.last_resort()
            why = f"{rank}{reason}"
            if not changed:
                self._recovery.stop(why, error, Cause.OOM, cause=names(Cause.OOM))
            self._log.fault(step, fault, f"{why}: {changed}", answer="clear_cache")
            return
        self._log.fault(
            step,
            fault,
            f"{rank}{resize.before} of {resize.samples} samples do not fit into memory, the step "
            f"is repeated with {resize.after} at a time: {overrun.line}",
            answer="shrink_microbatch",
            samples=resize.samples,
            size_before=resize.before,
            size=resize.after,
        )
        self._recovery.restorer.record.microbatches = self.sizes.to_dict()  # for the next process
