"""A run without a framework: the Healer's ledger, choice, retention and records, and nothing else.

The store is a list and a step is healthy or not, so that hypothesis can try thousands of
histories. Killing it means: the list stays, all the rest is gone.
"""

import json
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from healcore.core.decision import Cause
from healcore.core.step_record import Why
from healcore.events import Log
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.checkpoints.known import KnownCheckpoints
from healcore.runtime.run.checkpoints.saver import Saver, SaveReason
from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.run.data_state import DATA_STATE_ITEM, DataState
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.envelope import Envelope
from healcore.runtime.run.loop_state import LoopState
from healcore.runtime.run.restore.resumption import Resumption
from healcore.runtime.run.restore.rollback_restore import RollbackRestore
from healcore.runtime.run.restore.stored import StoredCheckpoints
from healcore.runtime.run.rollback.remedy import Outcome, Remedy
from healcore.runtime.run.trouble import RollbackRecord, Trouble
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    CheckpointNotFound,
    Keep,
    Restored,
)
from healcore.runtime.store.store import CheckpointStore
from tests.healer.step_records import record
from tests.healer.training_loops import rules
from tests.runtime.run.bare_driver import BareDriver
from tests.runtime.run.bare_run import bare_run, schedule_of

EVERY, PROBATION, REGION = 4, 3, 12
KEEP = Keep(good=3, candidates=2)
POLICY = HostPolicy.of(rules(), {"rollback": {"probation": PROBATION, "region": REGION}})
NO_DATA = DataState(LoaderRegistry().position).state_dict()
"""Random states, and the positions of no loaders."""


class Killed(BaseException):
    """Stands for the kill of the process at this point."""


class Listed(CheckpointStore):
    """A CheckpointStore that remembers what was saved and holds no arrays."""

    durable = property(lambda self: True)  # type: ignore[assignment]

    def __init__(self) -> None:
        copier: Any = None
        super().__init__(copier)
        self.saves: dict[int, CheckpointInfo] = {}
        self.stored: dict[int, Any] = {}
        self.corrupt: set[int] = set()
        self.bad: list[tuple[int, tuple[str, ...]]] = []
        """Saves with NaN that were not reported yet."""
        self.finite = True
        self.calls_left = -1
        """Changes until the process is killed; negative: it is not."""

    def passes(self) -> None:
        """A point at which it may be killed."""
        if self.calls_left == 0:
            self.calls_left = -1
            raise Killed
        self.calls_left -= self.calls_left > 0

    def save(self, step: int, state: Any, *, record: Mapping[str, Any] | None = None) -> None:
        self.passes()
        attempt = max(1, len(AttemptHistory.of(record).starts))
        bad = () if self.finite else ("weights",)
        self.saves[step] = CheckpointInfo(step, "candidate", 0, 0.0, attempt, "a list", bad)
        self.stored[step] = json.loads(json.dumps(record))
        self.corrupt.discard(step)
        self.bad += [(step, bad)] if bad else []

    def checkpoints(self) -> list[CheckpointInfo]:
        history = AttemptHistory.newest(self.stored)
        return history.with_status(self.saves[step] for step in sorted(self.saves))

    def steps_on_disk(self) -> list[int]:
        return sorted(self.saves)

    def submit(self, step: int, job: Callable[[], None]) -> None:
        job()

    def verify(self, step: int) -> None:
        if step not in self.saves:
            raise CheckpointNotFound(step, list(self.saves), "a list")
        if step in self.corrupt:
            raise CheckpointDamaged(step, "a list", "it", "is damaged")

    def restore(self, step: int, like: Any) -> Restored:
        self.verify(step)
        self.passes()
        return Restored({DATA_STATE_ITEM: NO_DATA}, self.stored[step])

    def records(self) -> dict[int, Any]:
        return dict(self.stored)

    def replace_record(self, step: int, record: Mapping[str, Any]) -> None:
        self.verify(step)
        self.passes()
        self.stored[step] = json.loads(json.dumps(record))

    def delete(self, step: int) -> None:
        self.passes()
        del self.saves[step], self.stored[step]

    def take_nonfinite(self, up_to: float = math.inf) -> list[tuple[int, tuple[str, ...]]]:
        found = [each for each in self.bad if each[0] <= up_to]
        self.bad = self.bad[len(found) :]
        return found


class Process:
    """One process of the run, constructed as in `construction.construct`."""

    def __init__(self, store: Listed) -> None:
        self.store = store
        self.loaders = LoaderRegistry()
        self.events: list[dict[str, Any]] = []
        log: Any = RunLog(Log(None), console=False)
        log.event = lambda kind, **fields: self.events.append({"kind": kind, **fields})
        driver = BareDriver()
        self.run = bare_run(log, driver, policy=POLICY, store=store)
        self.ledger = self.run.ledger
        self.run.loaders = self.loaders
        step_batches: Any = SimpleNamespace(steps_of=lambda batches: batches)
        self.run.step_batches = step_batches
        self.run.data_state = DataState(self.loaders.position)
        self.run.schedule = schedule_of(self.run, EVERY)
        loop_state = LoopState(self.loaders, self.run.progress, has_trainer=False)
        self.run.loop = SimpleNamespace(state=loop_state, note_steps=lambda: None)  # type: ignore[assignment]
        self.run.known_checkpoints = KnownCheckpoints(
            policy=POLICY,
            store=store,
            log=log,
            record=self.run.record,
            ledger=self.ledger,
        )
        no_comparisons: Any = SimpleNamespace(
            is_enabled=False,
            state=ComparisonState(),
            on_rollback=lambda target: None,
        )
        self.run.comparisons = no_comparisons
        self.run.monitor = SimpleNamespace(state=self.run.record.monitor)  # type: ignore[assignment]
        holding: Any = SimpleNamespace(envelope=Envelope(), hold=lambda envelope, step: None)
        self.run.holding = holding
        self.run.rate_log = SimpleNamespace(lr_scale=1.0)  # type: ignore[assignment]
        self.saver = self.run.saver = Saver(self.run, KEEP)
        self.run.stored_checkpoints = StoredCheckpoints(self.run)
        recovery: Any = SimpleNamespace(counts_steps=True)
        self.run.recovery = recovery
        self.run.rollback_restore = RollbackRestore(self.run)
        self.run.resumption = Resumption(self.run)
        self.incident, self._goes_on = 0, False

    step = property(lambda self: self.run.progress.step)
    known_checkpoints = property(lambda self: self.run.known_checkpoints)
    onset = property(lambda self: self.ledger.incidents[-1].onset)
    """The onset of the incident under way."""

    def begin(self) -> None:
        """The same steps as `start._begin`."""
        usable = [s.step for s in self.store.checkpoints() if s.finite and s.status != "abandoned"]
        if usable:
            newest = self.run.stored_checkpoints.newest_record()
            self.run.progress.step, _ = self.run.resumption.resume(newest, usable[::-1])
        else:
            self.saver.begin_attempt(self.step)
        if not self.store.saves:
            self.save(SaveReason.FIRST)

    def take(self, *, alarm: bool, skip: bool, is_open: bool) -> None:
        cause = Cause.NONFINITE_LOSS if alarm else Cause(0)
        # The engine counts a new incident; after a restart it goes on from the checkpoint's count.
        self.incident += alarm and not self._goes_on
        self._goes_on = alarm or is_open
        incident = {"incident": self.incident, "incident_open": is_open}
        judged = record(step=self.step + 1, cause=cause, why=Why(skip), **incident)
        self.ledger.add_step(StepResult(self.step, [judged], ()))
        self.run.progress.step += 1
        if self.step % EVERY == 0 and not self.ledger.open:
            self.save(SaveReason.REGULAR)
        self.saver.poll()

    def save(self, why: SaveReason) -> None:
        self.saver.save_state_as(self.step, why)

    def go_back(self, depth: int) -> RollbackRecord:
        trouble = Trouble(onset=self.onset, found_at=self.step - 1, since=self.onset)
        tried = [each.checkpoint for each in self.ledger.same_trouble(self.onset, REGION)]
        steps = self.run.rollback_restore.choose(trouble, depth=depth, tried=tried)
        repeat = Remedy(Outcome.REPEAT, Envelope())
        done = self.run.rollback_restore.restore(trouble, repeat, steps)
        self.run.progress.step, self._goes_on = done.checkpoint, False
        return done
