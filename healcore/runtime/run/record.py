"""What a checkpoint holds besides the live state: `Record`, and per rank `HostState`.

A restart reads the budgets, the learning-rate multiplier and the skipped batches from the record of
the checkpoint that it resumes. A rollback replaces the record of the checkpoint that it restores.
The host's state is optional: checkpoints of other programs restore without it. Its values are
plain, so that reading them runs no code.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter

from healcore.runtime.run.evidence import ComparisonState
from healcore.runtime.run.ledger import Ledger
from healcore.runtime.store import Course, StoreError, values

ITEM = "healcore"
"""Name of the item in a checkpoint."""

_GENERATORS = ("python", "numpy", "framework")
_DATA = "data"


class HostParts(NamedTuple):
    """The content of a saved `HostState`. A random state of None is not restored."""

    python: Any
    numpy: Any
    framework: Any
    data: dict[str, Any]  # positions of the loaders


class HostState:
    """Random states and loader positions, saved like any object with `state_dict`.

    A step can raise after it has read batches and drawn random numbers. To save the state after the
    previous step, `after_step` keeps the random states, and `before_batches` makes `state_dict`
    return them.
    """

    per_rank = True
    optional = True

    def __init__(self, position: Callable[[], dict[str, Any]], generators: Any) -> None:
        """Takes a function that returns the loaders' positions, and the framework's generators."""
        self._position = position
        self._generators = generators
        self._after_step: dict[str, Any] | None = None
        self._earlier: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Generators of Python, NumPy and the framework, and positions of the loaders."""
        if self._earlier is not None:
            return self._earlier
        # Positions first, because a loader may draw random numbers to give its position.
        data = self._position()
        return _as_text(self._current()) | {_DATA: data}

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
        self._earlier = _as_text(self._after_step) | {_DATA: data}
        try:
            yield
        finally:
            self._earlier = None

    def _current(self) -> dict[str, Any]:
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 (the global generator)
            "framework": None if self._generators is None else self._generators.state_dict(),
        }

    def read(self, state: Mapping[str, Any] | None) -> HostParts | None:
        """Decodes and checks a checkpoint's item; None without an item. Sets nothing.

        Raises StoreError if healcore cannot have written the content.
        """
        if state is None:
            return None
        try:
            generators = {name: values.loads(state[name], (ITEM, name)) for name in _GENERATORS}
            _check_generators(generators["python"], generators["numpy"])
            return HostParts(**generators, data=dict(state[_DATA]))
        except StoreError:
            raise
        except Exception as error:  # crafted or damaged values may raise anything
            problem = f"{type(error).__name__}: {str(error)[:200]}"
            raise StoreError(
                f"state['{ITEM}'] is damaged, or healcore did not write it: {problem}"
            ) from error

    def put_back(self, parts: HostParts) -> None:
        """Sets the generators, except those without a state.

        Call it after moving the loaders, because that draws numbers.
        """
        self._after_step = None
        if parts.python is not None:
            random.setstate(parts.python)
        if parts.numpy is not None:
            np.random.set_state(parts.numpy)  # noqa: NPY002
        if parts.framework is not None and self._generators is not None:
            self._generators.load_state_dict(parts.framework)


def _as_text(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values.dumps(state, (ITEM, name)) for name, state in states.items()}


def _check_generators(python: Any, numpy: Any) -> None:
    """Sets temporary generators, so that an invalid state fails before any generator is set.

    NumPy does not check the position in the Mersenne Twister's array, which could be out of range.
    """
    random.Random().setstate(python)
    inner = numpy.get("state", {}) if isinstance(numpy, dict) else {"pos": numpy[2]}
    if not 0 <= int(inner.get("pos", 0)) <= 624:
        raise ValueError("the position of NumPy's generator is out of range")
    if not isinstance(numpy, dict):
        np.random.RandomState().set_state(numpy)


SCHEMA = 3
_Step = Annotated[int, Field(ge=0)]
_Loader = Annotated[str, Field(pattern=r"^[0-9]{1,18}$")]
_BatchId = Annotated[list[_Step], Field(min_length=2, max_length=2)]


@dataclass(kw_only=True)
class Record:
    """The facts of a run after some step."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    run: str = ""  # id of the run's first process
    first_step: _Step = 0  # step of the run's first snapshot
    attempts: list[_Step] = field(default_factory=list)  # see `Course`
    proven: int = -1  # see `Course`
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
    left_out: dict[_Loader, list[_BatchId]] = field(default_factory=dict)
    """Number of a loader -> ids of the batches that the loader skips."""
    forward: dict[_Loader, dict[str, Any]] = field(default_factory=dict)
    """Number of a loader that cannot be rewound -> its position, which a rollback keeps."""
    comparisons: ComparisonState | None = None  # of weights, or None without a `loss_fn`

    @property
    def course(self) -> Course:
        """The attempts of the run, and the step up to which checkpoints are known-good."""
        return Course(tuple(self.attempts), self.proven)

    def repeats(self, step: int) -> bool:
        """Whether the last rollback undid the steps from `step` on."""
        return bool(self.ledger.rollbacks) and self.ledger.rollbacks[-1].target >= step

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe values."""
        return {**asdict(self), "schema": SCHEMA}


_RECORD = TypeAdapter(Record)


def read(healing: Mapping[str, Any]) -> Record:
    """Inverse of `to_dict`. Raises StoreError or ValueError for other values."""
    content = dict(healing)
    if content.pop("schema", None) != SCHEMA:
        raise StoreError("it is of another version of healcore: resume with that version")
    return _RECORD.validate_json(json.dumps(content), strict=True)
