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
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes, Resize
from healcore.runtime.microbatches.splitting import UnsplittableBatch
from healcore.runtime.microbatches.window import AccumulationWindow, Failure
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.rollback.manager import RollbackManager
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
    rollbacks: RollbackManager
    log: RunLog
    step: Callable[[], int]
    run_end: Callable[[str], RunEnd]
    """Takes the reason of a stop; returns the facts for the diagnosis."""

    def __post_init__(self) -> None:
        self._answers = self.policy.answers(Cause.OOM)
        self.sizes = MicrobatchSizes(
            shrinks=self.policy.shrinks, grow_after=self.policy.refund_after
        )
        self.window = AccumulationWindow(
            self.driver.gradient_window(),
            self.sizes,
            on_failure=self._failed,
            may_grow=lambda: None if self.ledger.open else self.step(),
            on_growth=self._grown,
            clear_cache="clear_cache" in self._answers,
        )

    def resume(self) -> None:
        """Takes over the sizes that an earlier process has found."""
        found = self.rollbacks.journal.state.microbatches
        if found is not None:
            self.sizes.load(found)

    def _failed(self, failure: Failure) -> bool:
        """Whether to do the window again; RunStopped if there is no smaller part."""
        error = failure.error
        fault = classify(error)
        if fault.cause is not Cause.OOM or not isinstance(error, Exception):
            return False
        why_not = self._why_not(failure)
        if why_not:
            error.add_note(f"healcore has not tried smaller parts of the batch: {why_not}")
            return False
        try:
            size = failure.size()
            resize = self.sizes.shrink(size, failure.parts, self.step())
        except UnsplittableBatch as reason:
            error.add_note(f"healcore has not tried smaller parts of the batch: {reason}")
            return False
        except CannotShrink as reason:
            self._stop(str(reason), error)
        problem = (
            f"{resize.before} of {resize.samples} samples do not fit into memory, the step is done "
            f"again with {resize.after} at a time: {_first_line(error)}"
        )
        self.log.event(
            "fault",
            step=self.step(),
            cause=names(fault.cause),
            sign=fault.sign,
            problem=problem,
            answer="shrink_microbatch",
            samples=resize.samples,
            size_before=resize.before,
            size=resize.after,
            bytes=_bytes(error),
        )
        self.log.warning(f"step {self.step()}: {problem}")
        self._save_sizes()
        return True

    def _why_not(self, failure: Failure) -> str:
        """Why the policy or the loop does not permit a redo; "": they do."""
        if self.policy.observes:
            return "the policy only observes"
        if "shrink_microbatch" not in self._answers:
            return (
                f'policy {self.policy.name} has no rule for it: to = ["oom"], '
                'do = ["shrink_microbatch", "clear_cache"]'
            )
        if self.ranks.world > 1:
            return (
                "the other ranks would wait for this one; pass the size that fits, "
                "healer.microbatches(batch, most=...), on every rank"
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
        self.rollbacks.journal.state.microbatches = self.sizes.to_dict()
        self.rollbacks.write_journal(self.step())

    def _stop(self, why: str, error: Exception) -> NoReturn:
        end = self.run_end(why)
        text = explain(end)
        self.log.event(
            "stop",
            step=self.step(),
            cause=names(Cause.OOM),
            why=why,
            diagnosis=text,
            checkpoint=end.last_good,
            bytes=_bytes(error),
        )
        raise RunStopped(text, why, end.last_good) from error


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _bytes(error: Exception) -> int | None:
    """What could not be allocated, where the message of torch or XLA says it."""
    found = _BYTES.search(str(error))
    if found is None:
        return None
    unit = found[2].lower().removesuffix("bytes").removesuffix("b").removesuffix("i")
    return int(float(found[1]) * 1024 ** _UNITS[unit])
