"""The numbers that influence a decision, and how a run is made with another value of one."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

POLICY = "default"
CONSTANTS = (
    "healcore.core.numerics:HUGE",
    "healcore.core.detectors.spike:THRESHOLD_GAIN",
    "healcore.core.detectors.spike:TARGET_VOTE",
    "healcore.core.detectors.spike:MIN_THRESHOLD_SHARE",
    "healcore.core.detectors.spike:ESCAPE_WINDOWS",
    "healcore.core.engine.lr:RESTART_RATIO",
    "healcore.runtime.dominance.anchor:STAKE",
    "healcore.runtime.dominance.anchor:SAMPLE",
    "healcore.runtime.dominance.anchor:MAJORITY",
    "healcore.runtime.dominance.anchor:ROUNDING",
    "healcore.runtime.dominance.history:HEARTBEAT",
    "healcore.runtime.dominance.dominance:MAX_ANCHORS",
    "healcore.runtime.dominance.dominance:MIN_AGE",
    "healcore.runtime.dominance.dominance:RESTART_POWER",
    "healcore.runtime.dominance.dominance:MAX_SHARE",
    "healcore.runtime.dominance.dominance:STEP_COST",
    "healcore.runtime.dominance.dominance:MAX_CREDIT",
    "healcore.runtime.dominance.dominance:MAX_DEBT",
    "healcore.runtime.dominance.dominance:PRICED",
    "healcore.runtime.dominance.dominance:SAME_LOSS",
    "healcore.runtime.dominance.history:RECENT",
    "healcore.runtime.dominance.history:BEFORE",
    "healcore.runtime.dominance.history:AFTER",
    "healcore.runtime.dominance.history:UNUSUAL_NORM",
    "healcore.runtime.recovery.trials:MAX_LEFT_OUT",
    "healcore.runtime.recovery.trials:MAX_ACCEPTED",
    "healcore.runtime.recovery.trials:ABOVE",
    "healcore.runtime.loop.saver:RECENT_ALARM_STEPS",
    "healcore.runtime.loop.setup:MAX_CANDIDATES",
    "healcore.runtime.store.retention:Keep.good",
    "healcore.runtime.recovery.monitor:MIN_STEPS_REMEMBERED",
    "healcore.runtime.recovery.monitor:MIN_INTERVALS_REMEMBERED",
)
"""Constants of modules, and defaults of a NamedTuple's fields."""
SHARED = {
    "detect.loss_spike.min_noise": ("healcore.core.detectors.noise:SMALL",),
    "healcore.runtime.dominance.anchor:SAMPLE": ("healcore.runtime.dominance.dominance:SAMPLE",),
}
"""A number -> other places of the same number, which change with it."""
INERT = {
    "max_skips": "no rule of the policy skips a finite step",
    "lr.floor": "no rule of the policy cuts the learning rate",
    "lr.hold_steps": "a limit holds and ramps to the same rate",
    "lr.ramp_steps": "a limit holds and ramps to the same rate",
    "lr.ceiling": "only whether it is above 0",
}
"""Keys of the policy that change no decision, and why."""
FAULTS = ("schema", "hang.", "retry.", "skip_batch.", "microbatch", "budget.shrinks")
"""Keys about exceptions and steps that never return, by how they begin. No run of healbench reaches
them."""


@dataclass(frozen=True)
class Number:
    """One number."""

    name: str
    """A key of the policy, or a constant as in `CONSTANTS`."""
    value: float
    apply: Callable[[float], AbstractContextManager[dict[str, Any]]]
    """Puts another value into force. Yields arguments for the arm."""


def numbers() -> Iterator[Number]:
    """All numbers: those of the policy, then the constants."""
    from healcore.policy import load, to_dict

    values = {".".join(map(str, path)): value for path, value in _leaves(to_dict(load(POLICY)))}
    values |= {name: constant(name) for name in CONSTANTS}
    elsewhere = {each for others in SHARED.values() for each in others}
    for name, value in values.items():
        if name not in elsewhere and name not in INERT and not name.startswith(FAULTS):
            yield Number(name, value, _at((name, *SHARED.get(name, ()))))


def constant(name: str) -> Any:
    """The value of a constant."""
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for each in path.split("."):
        found = found._field_defaults[each] if hasattr(found, "_fields") else getattr(found, each)
    return found


def changed(value: float, factor: float) -> float:
    """The value times the factor; a whole number stays whole, and changes by 1 at least."""
    if isinstance(value, int):
        step = 1 if factor > 1 else -1
        return value + step if round(value * factor) == value else round(value * factor)
    return value * factor


@contextlib.contextmanager
def applied(variation: str) -> Iterator[dict[str, Any]]:
    """A variation in force, `lr.factor*0.75`; an empty string changes nothing.

    Yields:
        Arguments for the arm.

    Raises:
        ValueError: There is no such number, or the policy rejects the value.
    """
    if not variation:
        yield {}
        return
    name, _, factor = variation.rpartition("*")
    found = next((each for each in numbers() if each.name == name), None)
    if found is None:
        raise ValueError(f"no number is called {name!r}")
    with found.apply(changed(found.value, float(factor))) as options:
        yield options


def _leaves(tree: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Paths and values of the numbers in a tree; zero times anything is zero and is left out."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in pairs:
        if isinstance(value, dict | list):
            yield from _leaves(value, (*path, key))
        elif _is_choice(key, value):
            yield (*path, key), value


def _is_choice(key: Any, value: Any) -> bool:
    """Whether it is a number, other than zero and the `consecutive = 1` of most rules."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return bool(value) and (key, value) != ("consecutive", 1)


def _at(names: tuple[str, ...]) -> Callable[[float], AbstractContextManager[dict[str, Any]]]:
    @contextlib.contextmanager
    def apply(value: float) -> Iterator[dict[str, Any]]:
        keys = [each for each in names if ":" not in each]
        with contextlib.ExitStack() as stack:
            for each in names:
                if ":" in each:
                    stack.enter_context(_in_module(each, value))
            yield {"policy": _policy(keys, value)} if keys else {}

    return apply


def _policy(keys: Iterable[str], value: float) -> Any:
    """The policy with another value at some keys."""
    from healcore.policy import from_dict, load, to_dict

    data = deepcopy(to_dict(load(POLICY)))
    for key in keys:
        *path, last = (int(part) if part.isdigit() else part for part in key.split("."))
        inner: Any = data
        for each in path:
            inner = inner[each]
        inner[last] = value
    return from_dict(data)


@contextlib.contextmanager
def _in_module(name: str, value: float) -> Iterator[None]:
    module, _, path = name.partition(":")
    place: Any = importlib.import_module(module)
    before = constant(name)

    def put(new: float) -> None:
        table, _, field = path.rpartition(".")
        if not table:
            setattr(place, path, new)
            return
        named = getattr(place, table)
        named._field_defaults[field] = new
        named.__new__.__defaults__ = tuple(named._field_defaults.values())

    put(value)
    try:
        yield
    finally:
        put(before)
