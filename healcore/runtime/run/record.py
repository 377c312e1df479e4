"""What a checkpoint holds besides the live state: `RunRecord` (with `Ledger`) and `HostState`.

A restart reads the budgets, the learning-rate multiplier and the skipped batches from the record of
the checkpoint that it resumes. A rollback replaces the record of the checkpoint that it restores.
The host's state is optional: checkpoints of other programs restore without it. Its values are
plain, so that reading them runs no code.

Steps are indexed from 0. A checkpoint of step n holds the state that step n starts from.
"""

from __future__ import annotations

import bisect
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter

from healcore.core.decision import NONFINITE, Cause, StepRecord, names
from healcore.runtime.run.evidence import ComparisonState
from healcore.runtime.run.orders import RollbackRecord
from healcore.runtime.store import values
from healcore.runtime.store.saved import AttemptHistory, StoreError

_MAX_INCIDENTS = 1000
"""Max incidents in the ledger; the oldest are dropped."""


@dataclass
class IncidentRecord:
    """One incident, from the step of its first alarm (`onset`) to its latest alarm (`last`)."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    number: int
    """Number of the incident, from 1 over the whole run. A rollback does not reset the count."""
    onset: int
    last: int
    cause: int
    """`Cause` flags of all alarms."""
    first: dict[str, int] = field(default_factory=dict)
    """Name of a cause -> first step with this cause."""
    alarms: int = 0
    skips: int = 0
    over: bool = False
    number_in_engine: int = 0
    """The engine's number of this incident, or -1 if the engine's count has restarted since."""

    @property
    def only_skips(self) -> bool:
        """Whether each alarm is a skipped step that was not finite, which changed no weights."""
        return self.skips == self.alarms and not Cause(self.cause) & ~NONFINITE

    def add(self, index: int, causes: int) -> None:
        """Adds an alarm at a step, with its `Cause` flags."""
        self.last, self.alarms, self.cause = index, self.alarms + 1, self.cause | causes
        for name in names(Cause(causes)):
            self.first.setdefault(name, index)


@dataclass
class Ledger:
    """The host's record of a run. `record` adds the steps in order."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    next_step: int = 0
    unhealthy: list[int] = field(default_factory=list)
    """Steps that were skipped or not taken or had an alarm within an incident, and the micro-steps
    right after such a step; ascending."""
    incidents: list[IncidentRecord] = field(default_factory=list)
    rollbacks: list[RollbackRecord] = field(default_factory=list)  # see `RollbackRecord.outline`
    incident_count: int = 0  # including undone and dropped incidents
    skips: int = 0  # skipped steps so far, including undone steps
    untrained: int = 0  # steps in which no optimizer took a step, excluding undone steps
    open: bool = False  # whether an incident with more than skipped non-finite steps is open
    accepted: int = 0  # places accepted in a row: the trouble came back after all that was tried
    accepted_until: int = 0  # step before which no comparison rolls back again

    def record(
        self, index: int, records: Sequence[StepRecord], opening: int = -1
    ) -> IncidentRecord | None:
        """Adds the records of one step. Returns the incident of the step, or None.

        `opening` has the `Cause` flags that open an incident; all other alarms only alert.
        """
        self.next_step = index + 1
        if not any(record.judged for record in records):
            if not records[0].taken:
                self.unhealthy.append(index)
                self.skips += 1
                self.untrained += 1
                return None
            # A micro-step of an optax.MultiSteps around protect neither ends an incident nor a row
            # of unhealthy steps: the next update decides.
            if self.unhealthy and self.unhealthy[-1] == index - 1:
                self.unhealthy.append(index)
            return None
        self.open = any(record.incident_open for record in records)
        cause = 0
        for record in records:
            # An alert alone (a clipped gradient spike) opens no incident.
            if record.incident_open or record.skip:
                cause |= int(record.cause) & opening
        if not cause:
            if self.incidents and not self.open:
                self.incidents[-1].over = True
            return None
        self.unhealthy.append(index)
        skip = any(record.skip for record in records)
        incident = self._current(index, records, skip and not Cause(cause) & ~NONFINITE)
        incident.add(index, cause)
        incident.skips += skip
        self.skips += skip
        self.untrained += all(record.skip for record in records)
        return incident

    def _current(self, index: int, records: Sequence[StepRecord], harmless: bool) -> IncidentRecord:
        """Finds or opens an alarm's incident. An incident of skips only takes no other alarms."""
        last = self.incidents[-1] if self.incidents else None
        number = max(record.incident for record in records)
        if last is not None and last.only_skips:
            same = harmless and number == last.number_in_engine
        else:
            same = last is not None and not last.over
        if last is None or not same:
            if last is not None:
                last.over = True
            self.incident_count += 1
            last = IncidentRecord(self.incident_count, index, index, 0, number_in_engine=number)
            self.incidents.append(last)
            del self.incidents[:-_MAX_INCIDENTS]
        last.over = False
        return last

    def same_trouble(self, onset: int, within: int = 0) -> list[RollbackRecord]:
        """Earlier rollbacks for the trouble that begins at step `onset`, oldest first.

        The trouble is the same if its onset is at most `within` steps after the step at which the
        rollback began.
        """
        return [rollback for rollback in self.rollbacks if onset <= rollback.step + within]

    def unhealthy_between(self, first: int, end: int) -> list[int]:
        """Unhealthy steps from `first` to before `end`."""
        steps = self.unhealthy
        return steps[bisect.bisect_left(steps, first) : bisect.bisect_left(steps, end)]

    def healthy_steps(self, first: int, end: int) -> int:
        """Number of healthy steps from `first` to before `end`.

        Unhealthy steps do not restart the count: otherwise no checkpoint would become known-good in
        a run that skips a bad batch now and then.
        """
        return end - first - len(self.unhealthy_between(first, end))

    def first_consecutive(self, index: int) -> int:
        """First of the consecutive unhealthy steps that end at step `index`."""
        at = bisect.bisect_right(self.unhealthy, index)
        while at > 0 and self.unhealthy[at - 1] == index:
            at, index = at - 1, index - 1
        return index + 1

    def on_rollback(self, rollback: RollbackRecord, saved: Ledger | None) -> None:
        """Records an applied rollback; `saved` is the ledger in the restored checkpoint."""
        self.rollbacks.append(rollback.outline())
        self._rewind(rollback.target, saved)

    def forget(self, before: int) -> None:
        """Drops unhealthy steps before a step, except consecutive ones up to the newest step."""
        before = min(before, self.first_consecutive(self.next_step - 1))
        del self.unhealthy[: bisect.bisect_left(self.unhealthy, before)]

    def continue_from(self, saved: Ledger, step: int) -> None:
        """Continues an earlier process from a checkpoint of `step` that holds its ledger."""
        vars(self).update(vars(saved))
        self._rewind(step, None)

    def _rewind(self, step: int, saved: Ledger | None) -> None:
        self.next_step, self.open = step, False
        del self.unhealthy[bisect.bisect_left(self.unhealthy, step) :]
        if self.incidents:
            self.incidents[-1].over, self.incidents[-1].number_in_engine = True, -1
        if saved is not None:
            self.untrained = saved.untrained


# -- random states and positions of the loaders ----------------------------------------------------

HOST_ITEM = "healcore"
"""Name of the item in a checkpoint."""

_GENERATORS = ("python", "numpy", "framework", "at_pass")
_DATA = "data"


class HostParts(NamedTuple):
    """The content of a saved `HostState`. A random state of None is not restored."""

    python: Any
    numpy: Any
    framework: Any
    at_pass: dict[str, Any]  # random states before the pass over the data
    data: dict[str, Any]  # positions of the loaders


class HostState:
    """Random states and loader positions, saved like any object with `state_dict`.

    A step can raise after it has read batches and drawn random numbers. To save the state after the
    previous step, `after_step` keeps the random states, and `before_batches` makes `state_dict`
    return them.
    """

    per_rank = True
    optional = True

    def __init__(self, position: Callable[[], dict[str, Any]]) -> None:
        """Takes a function that returns the loaders' positions."""
        self._position = position
        self._after_step: dict[str, Any] | None = None
        self._earlier: dict[str, Any] | None = None
        self.begin_pass()

    def state_dict(self) -> dict[str, Any]:
        """Generators of Python, NumPy and torch, and positions of the loaders."""
        if self._earlier is not None:
            return self._earlier
        # Positions first, because a loader may draw random numbers to give its position.
        data = self._position()
        return self._as_text(self._current(), data)

    def begin_pass(self) -> None:
        """Keeps the random states from which the program may draw the order of its next pass."""
        self._at_pass = self._current()

    def after_step(self) -> None:
        """Keeps the random states after a step."""
        self._after_step = self._current()

    @contextmanager
    def before_batches(self, data: dict[str, Any]) -> Iterator[None]:
        """Within the block `state_dict` returns the state of the last `after_step`.

        `data` are the loaders' positions after that step. Raises StoreError if no step was taken.
        """
        if self._after_step is None:
            raise StoreError("no step was taken since the start or the last rollback")
        self._earlier = self._as_text(self._after_step, data)
        try:
            yield
        finally:
            self._earlier = None

    def _current(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 (the global generator)
            "framework": torch_states(),
        }

    def _as_text(self, states: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        states = {**states, "at_pass": self._at_pass}
        return {n: values.dumps(each, (HOST_ITEM, n)) for n, each in states.items()} | {_DATA: data}

    def read(self, state: Mapping[str, Any] | None) -> HostParts | None:
        """Decodes and checks a checkpoint's item; None without an item. Sets nothing.

        Raises StoreError if healcore cannot have written the content.
        """
        if state is None:
            return None
        try:
            generators = {n: values.loads(state[n], (HOST_ITEM, n)) for n in _GENERATORS}
            return HostParts(**generators, data=dict(state[_DATA]))
        except StoreError:
            raise
        except Exception as error:  # crafted or damaged values may raise anything
            problem = f"{type(error).__name__}: {str(error)[:200]}"
            raise StoreError(
                f"state['{HOST_ITEM}'] is damaged, or healcore did not write it: {problem}"
            ) from error

    def put_back(self, parts: HostParts) -> None:
        """Sets the generators, except those without a state.

        Call it after moving the loaders, because that draws numbers.
        """
        self._after_step, self._at_pass = None, parts.at_pass or self._at_pass
        if parts.python is not None:
            random.setstate(parts.python)
        if parts.numpy is not None:
            np.random.set_state(parts.numpy)  # noqa: NPY002
        set_torch_states(parts.framework or {})


def torch_states() -> dict[str, Any]:
    """Torch's states, arrays of NumPy: `{"cpu": uint8 (n,), "cuda": [uint8 (m,) of each device]}`.

    Empty in a program without torch. A JAX run may read from a shuffled loader of torch. Reading
    the states is no sync: a CUDA generator's seed and offset are on the host.
    """
    if (torch := sys.modules.get("torch")) is None:
        return {}
    # get_rng_state_all would initialise CUDA in a process that only uses the CPU.
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {"cpu": torch.get_rng_state().numpy(), "cuda": [each.numpy() for each in cuda]}


def set_torch_states(states: Mapping[str, Any]) -> None:
    """Sets torch's generators, if the program uses torch, on the devices that it has."""
    if (torch := sys.modules.get("torch")) is None or not states:
        return
    torch.set_rng_state(torch.as_tensor(states["cpu"]))
    for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(torch.as_tensor(state), device)


@contextmanager
def isolated() -> Iterator[None]:
    """Restores all generators after the block."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 -- users do
    torch = torch_states()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        set_torch_states(torch)


# -- the record of the run -------------------------------------------------------------------------

SCHEMA = 4
_Step = Annotated[int, Field(ge=0)]
_Loader = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
_BatchId = Annotated[list[_Step], Field(min_length=2, max_length=2)]


@dataclass(kw_only=True)
class RunRecord:
    """The facts of a run after some step."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    run: str = ""  # id of the run's first process
    first_step: _Step = 0  # step of the run's first snapshot
    attempts: list[_Step] = field(default_factory=list)  # see `AttemptHistory`
    known_good_up_to: int = -1  # see `AttemptHistory`
    completed: bool = False  # whether the program had reached its end
    settings: dict[str, Any] = field(default_factory=dict)
    """Learning rate, batch size, policy and other settings of the start, see `run_settings`."""
    nonfinite_ok: list[str] = field(default_factory=list)
    """Names of arrays that were not finite in the first snapshot."""
    part_limit: Annotated[int, Field(ge=1)] | None = None
    """Largest number of samples of a micro-batch, or None while all batches have fitted."""
    shrinks: _Step = 0  # how often the micro-batches were halved after running out of memory
    passes: _Step = 0  # most calls of `batches` in a process of the run

    # -- at the step of the checkpoint
    step: _Step = 0
    world: Annotated[int, Field(ge=1)] = 1  # number of ranks
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)  # of `Engine.to_dict`
    ledger: Ledger = field(default_factory=Ledger)
    skipped: dict[_Loader, list[_BatchId]] = field(default_factory=dict)
    """Number of a loader -> ids of the batches that the loader skips."""
    forward: dict[_Loader, dict[str, Any]] = field(default_factory=dict)
    """Number of a loader that cannot be rewound -> its position, which a rollback keeps."""
    comparisons: ComparisonState | None = None  # of weights, or None without a `loss_fn`

    @property
    def attempt_history(self) -> AttemptHistory:
        """The attempts of the run, and the step up to which checkpoints are known-good."""
        return AttemptHistory(tuple(self.attempts), self.known_good_up_to)

    def repeats(self, step: int) -> bool:
        """Whether the last rollback undid the steps from `step` on."""
        return bool(self.ledger.rollbacks) and self.ledger.rollbacks[-1].target >= step

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        return {**asdict(self), "schema": SCHEMA}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> RunRecord:
        """Inverse of `to_dict`. Raises StoreError or ValueError for other values."""
        content = dict(stored)
        if content.pop("schema", None) != SCHEMA:
            raise StoreError("it is of another version of healcore: resume with that version")
        return _RECORD.validate_json(json.dumps(content), strict=True)


_RECORD = TypeAdapter(RunRecord)
