"""The core against the reference, decision by decision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from healcore.core.decision import Action
from healcore.core.engine import Engine, EngineConfig, EngineState
from healcore.core.engine.state import FROZEN
from healcore.core.signals import Signals
from healcore.core.trees import map_leaves
from tests.core import fuzz
from tests.core.reference import engine as reference

RTOL = 1e-4
"""For factors; a factor under 1e-29 is zero to the core."""


class Outcome(NamedTuple):
    """The result of a comparison."""

    steps: int
    """Steps compared: a lane ends at its first disagreement."""
    ties: int
    """Lanes that ended where the reference found the comparison too close to call."""
    wrong: str | None
    """The first other disagreement."""


Columns = dict[str, np.ndarray]
"""What a run decides at each step: arrays (steps, lanes), by name."""


class Expected(NamedTuple):
    """What the reference decides."""

    columns: Columns
    close: np.ndarray
    """bool (steps, lanes): too close to call."""

    def until(self, stop: int) -> Expected:
        """The columns of the steps before `stop`."""
        return Expected({name: x[:stop] for name, x in self.columns.items()}, self.close[:stop])


def lanes_of(trace: Signals) -> tuple[int, int]:
    """(steps, lanes)."""
    return next(part.shape[:2] for part in trace if part is not None)


def carried_out(step: int, lanes: Any) -> Any:
    """Whether the host carries out a rollback: never, always or at odd steps, by lane."""
    return (lanes % 4 == 1) | (lanes % 4 == 3) | ((lanes % 4 == 2) & (step % 2 == 1))


def limits(lanes: Any) -> tuple[Any, Any]:
    """Whether the host also limits the rate, and at which rate, by lane."""
    return lanes % 4 == 3, np.float32(10.0) ** -np.float32(lanes // 4 % 6 + 1)


def norm_limits(step: int, lanes: Any) -> tuple[Any, Any]:
    """Whether the host changes the limit of the gradient norm at this step, and the limit, by lane.

    Nothing is changed in a third of the lanes. In the others there is a limit of its own for two
    thirds of the time, also before the first rollback. In some of them the host freezes the steps
    for half of the rest.
    """
    limit = np.float32(10.0) ** ((lanes + step // 20) % 4 - 2).astype(np.float32)
    none = np.where((lanes % 3 == 2) & (step // 20 % 6 == 2), FROZEN, 0)
    return (lanes % 3 != 0) & (step % 20 == 10), np.where(step // 20 % 3 == 2, none, limit)


def reference_run(config: EngineConfig, trace: Signals, *, groups: int = 0) -> Expected:
    """Runs the reference on each lane."""
    steps, lanes = lanes_of(trace)
    columns = [None if part is None else part.tolist() for part in trace]
    close = np.zeros((steps, lanes), bool)
    rows: list[list[Any]] = [[None] * lanes for _ in range(steps)]
    for lane in range(lanes):
        machine = reference.Engine(config, groups=groups)
        is_limited, limit = limits(lane)
        for i in range(steps):
            seen = Signals(*(None if c is None else c[i][lane] for c in columns))
            sets_limit, norm_limit = norm_limits(i, np.int32(lane))
            if sets_limit and norm_limit == FROZEN:
                machine.freeze()
            elif sets_limit:
                machine.limit_norm(float(norm_limit))
            verdict = machine.see(seen)
            rows[i][lane] = (*verdict, *machine.report)
            close[i, lane] = machine.ties.close
            if verdict.action & Action.ROLLBACK and carried_out(i, lane):
                machine.roll_back()
                if is_limited:
                    machine.limit_lr(float(limit), seen.learning_rate)
    by_name = {}
    for k, name in enumerate((*reference.Verdict._fields, *reference.Report._fields)):
        if rows[0][0][k] is not None:
            by_name[name] = np.array([[row[k] for row in lane] for lane in rows])
    return Expected(by_name, close)


def core_run(config: EngineConfig, trace: Signals, *, groups: int = 0) -> Columns:
    """Runs the core on all lanes at once."""
    *_, whole = growing_run(config, trace, lanes_of(trace)[:1], groups=groups)
    return whole


def growing_run(
    config: EngineConfig, trace: Signals, stops: Iterable[int], *, groups: int = 0
) -> Iterator[Columns]:
    """The same, yielded after each of these numbers of steps, always from the first step on."""
    numbers = np.arange(lanes_of(trace)[1])
    engine = Engine(config)
    is_limited, limit = limits(numbers)
    state = engine.init(groups=groups, batch=lanes_of(trace)[1:])
    rows = []
    for stop in stops:
        for i in range(len(rows), stop):
            sets_limit, norm_limit = norm_limits(i, numbers)
            limited = engine.limit_norm(state, norm_limit)
            limited = where(norm_limit == FROZEN, engine.freeze(state), limited)
            state = where(sets_limit, limited, state)
            state, decision = engine.step(state, fuzz.at(trace, i))
            decided = {name: x for name, x in decision._asdict().items() if x is not None}
            last = {"threshold": state.last.threshold, "z": state.last.z}
            tally = state.tally._asdict() | {"incidents": state.incident.number}
            rows.append(decided | last | tally)
            back = carried_out(i, numbers) & (decision.action & int(Action.ROLLBACK) != 0)
            state = where(back, engine.on_rollback(state, state), state)
            rate = None if trace.learning_rate is None else trace.learning_rate[i]
            with np.errstate(all="ignore"):
                limited = engine.limit_lr(state, limit, rate)
            state = where(back & is_limited, limited, state)
        yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def where(lanes: np.ndarray, new: EngineState, old: EngineState) -> EngineState:
    """The state with these lanes of `new`, and the others of `old`."""
    return map_leaves(
        lambda a, b: np.where(lanes.reshape(lanes.shape + (1,) * (b.ndim - lanes.ndim)), a, b),
        new,
        old,
    )


def compare(expected: Expected, got: Columns) -> Outcome:
    """Compares lane by lane, up to the first disagreement."""
    steps, lanes = expected.close.shape
    differs = np.zeros((steps, lanes), bool)
    for name, a in expected.columns.items():
        b = got[name]
        if a.dtype.kind == "f":
            # A z-score is a difference of norms over one percent of them, or more.
            rtol, atol = (1e-3, 1e-3) if name == "z" else (RTOL, 1e-29)
            off = ~np.isclose(b, a, rtol=rtol, atol=atol)
        else:
            off = a != b
        differs |= off.reshape(steps, lanes, -1).any(-1)
    compared, ties, wrong = 0, 0, None
    for lane in range(lanes):
        where = np.flatnonzero(differs[:, lane])
        if not len(where):
            compared += steps
            continue
        first = int(where[0])
        compared += first
        if expected.close[first, lane]:
            ties += 1
        elif wrong is None:
            wrong = f"lane {lane}, step {first}: " + ", ".join(
                f"{name} {got[name][first, lane].tolist()} (reference: {a[first, lane].tolist()})"
                for name, a in expected.columns.items()
            )
    return Outcome(compared, ties, wrong)


def agree(config: EngineConfig, trace: Signals, *, groups: int = 0) -> Outcome:
    """Runs both and compares."""
    return compare(
        reference_run(config, trace, groups=groups), core_run(config, trace, groups=groups)
    )
