"""What follows when a part of a batch does not fit into memory: smaller parts, or a diagnosis."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from healcore.core.verdict import Cause, names
from healcore.runtime.driver import Driver
from healcore.runtime.faults import classify
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.loop.joint_redo import NOT_TRIED, JointRedo, Overrun
from healcore.runtime.loop.run_facts import stop
from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes, Resize
from healcore.runtime.microbatches.splitting import BatchSize, UnsplittableBatch
from healcore.runtime.microbatches.window import AccumulationWindow, DistributedWindow, Failure
from healcore.runtime.postmortem.diagnosis import RunEnd
from healcore.runtime.recovery.ledger import Ledger
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks

_BYTES = re.compile(r"allocat(?:e|ing)\s+([\d.]+)\s*(bytes|[KMGT]?i?B)\b", re.IGNORECASE)
_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(eq=False, kw_only=True)
class OutOfMemory:
    """Answers a part that ran out of memory, as the policy says. See `Healer.microbatches`."""

    policy: HostPolicy
    driver: Driver
    ranks: Ranks
    ledger: Ledger
    restorer: Restorer
    log: RunLog
    step: Callable[[], int]
    run_end: Callable[[str], RunEnd]
    """Takes the reason of a stop; returns the facts for the diagnosis."""
    on_redo: Callable[[], object] = lambda: None
    """Called before the parts since the last step come again."""

    def __post_init__(self) -> None:
        self._answers = self.policy.answers(Cause.OOM)
        self.sizes = MicrobatchSizes(
            shrinks=self.policy.shrinks, grow_after=self.policy.refund_after
        )
        self._gradients = self.driver.gradient_window()
        self._alone_why = ""
        """Why the other ranks cannot do a window again together with this one."""
        self.window = AccumulationWindow(
            self._gradients,
            self.sizes,
            on_failure=self._failed,
            may_grow=lambda: None if self.ledger.open else self.step(),
            on_growth=self._grown,
            on_redo=self.on_redo,
            clear_cache="clear_cache" in self._answers,
            together=self._together if self.ranks.world > 1 else lambda: None,
        )

    def resume(self) -> None:
        """Takes over the sizes that an earlier process has found."""
        found = self.restorer.journal.state.microbatches
        if found is not None:
            self.sizes.load(found)

    def described(self, failure: Failure) -> Overrun | None:
        """A part that did not fit into memory; None: it failed for another reason."""
        fault = classify(failure.error)
        if fault.cause is not Cause.OOM or not isinstance(failure.error, Exception):
            return None
        size, why_not = None, self._why_not(failure)
        if not why_not:
            try:
                size = failure.size()
            except UnsplittableBatch as reason:
                why_not = str(reason)
        return Overrun(
            size,
            failure.parts,
            fault.sign,
            _first_line(failure.error),
            _bytes(failure.error),
            why_not,
        )

    def shrink(self, overrun: Overrun, error: BaseException, rank: str = "") -> None:
        """Halves the parts, and reports it.

        Raises:
            RunStopped: there is no smaller part.
        """
        assert overrun.size is not None  # `why_not` is empty
        try:
            resize = self.sizes.shrink(overrun.size, overrun.parts, self.step())
        except CannotShrink as reason:
            self._stop(f"{rank}{reason}", error, overrun.bytes)
        problem = (
            f"{rank}{resize.before} of {resize.samples} samples do not fit into memory, the step "
            f"is done again with {resize.after} at a time: {overrun.line}"
        )
        self.log.event(
            "fault",
            step=self.step(),
            cause=names(Cause.OOM),
            sign=overrun.sign,
            problem=problem,
            answer="shrink_microbatch",
            samples=resize.samples,
            size_before=resize.before,
            size=resize.after,
            bytes=overrun.bytes,
        )
        self.log.warning(f"step {self.step()}: {problem}")
        self._save_sizes()

    def grow(self, size: BatchSize) -> None:
        """Tries twice the size if it is time to, and reports it."""
        resize = self.sizes.grow(size, self.step())
        if resize is not None:
            self._grown(resize)

    # -- within ---------------------------------------------------------------------------------

    def _failed(self, failure: Failure) -> bool:
        """Whether to do the window again, where no other rank has to."""
        overrun = self.described(failure)
        if overrun is None:
            return False
        if overrun.why_not:
            failure.error.add_note(f"{NOT_TRIED}: {overrun.why_not}")
            return False
        self.shrink(overrun, failure.error)
        return True

    def _together(self) -> DistributedWindow | None:
        """Called at the first window of several ranks: how all do windows again, if they can."""
        if self._not_answered():
            return None
        found = self._gradients.between_ranks(self.ranks)
        if isinstance(found, str):
            self._alone_why = found
            return None
        self._alone_why = ""
        redo = JointRedo(self, self.ranks, found)
        return DistributedWindow(found, redo.after_part)

    def _not_answered(self) -> str:
        """Why the policy does not permit a redo; "": it does."""
        if self.policy.observes:
            return "the policy only observes"
        if "shrink_microbatch" not in self._answers:
            return (
                f'policy {self.policy.name} has no rule for it: to = ["oom"], '
                'do = ["shrink_microbatch", "clear_cache"]'
            )
        return ""

    def _why_not(self, failure: Failure) -> str:
        """Why the policy or the loop does not permit a redo; "": they do."""
        if self._not_answered():
            return self._not_answered()
        if self._alone_why:
            return (
                f"{self._alone_why}; pass the size that fits, healer.microbatches(batch, "
                "most=...), on every rank"
            )
        if not failure.redoable:
            return (
                "there were gradients before its first part, which would be lost: put their "
                "backward pass into a part too, or clear them with zero_grad(set_to_none=True)"
            )
        return ""

    def _grown(self, resize: Resize) -> None:
        self.log.event(
            "grow",
            step=self.step(),
            samples=resize.samples,
            size_before=resize.before,
            size=resize.after,
        )
        self.log.info(
            f"step {self.step()}: tries {resize.after} samples at a time again, not {resize.before}"
        )
        self._save_sizes()

    def _save_sizes(self) -> None:
        """Writes the sizes for the next process."""
        self.restorer.journal.state.microbatches = self.sizes.to_dict()
        self.restorer.write_journal(self.step())

    def _stop(self, why: str, error: BaseException, size: int | None) -> NoReturn:
        stop(self.log, self.run_end(why), error, cause=names(Cause.OOM), bytes=size)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _bytes(error: BaseException) -> int | None:
    """What could not be allocated, where the message of torch or XLA says it."""
    found = _BYTES.search(str(error))
    if found is None:
        return None
    unit = found[2].lower().removesuffix("bytes").removesuffix("b").removesuffix("i")
    return int(float(found[1]) * 1024 ** _UNITS[unit])
