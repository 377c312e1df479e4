"""One engine, fed step by step. Without lanes its step is recorded once: a fifth of the time."""

import functools
from typing import Any

import numpy as np

from healcore.core.decision import Action, Cause, Decision
from healcore.core.detectors import DETECTORS
from healcore.core.engine import Engine, EngineConfig, EngineState, RuleConfig
from healcore.core.signals import Signals
from healcore.core.tape import to_program
from healcore.core.trees import map_leaves


def leaves(tree: Any) -> list[Any]:
    """The arrays of a tree."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found


def recorded(engine: Engine) -> Any:
    """The step, recorded once for each choice of signals. States are of NumPy scalars."""
    programs: dict[Any, Any] = {}

    def step(state: EngineState, signals: Signals) -> Any:
        there = tuple(value is None for value in signals)
        if there not in programs:
            programs[there] = to_program(engine.step, state, signals)
        return programs[there](state, signals)

    return step


def scalars(state: EngineState) -> EngineState:
    """A state whose 0-d arrays are NumPy scalars."""
    return map_leaves(lambda x: x[()] if np.ndim(x) == 0 else x, state)


class Runner:
    """An engine with its state, in NumPy."""

    def __init__(self, config: EngineConfig, *, groups: int = 0, lanes: int = 0) -> None:
        self.engine = Engine(config)
        self.state: EngineState = self.engine.init(groups=groups, batch=(lanes,) if lanes else ())
        self._step = functools.partial(self.engine.step) if lanes else recorded(self.engine)
        self._convert = (lambda state: state) if lanes else scalars

    def step(self, **signals: Any) -> Decision:
        """Feeds one step of numbers or arrays; None is absent."""
        flags = ("change_expected", "externally_skipped")
        kinds = {name: bool if name in flags else np.float32 for name in signals}
        there = {name: x for name, x in signals.items() if x is not None}
        given = Signals(**{name: np.asarray(x, kinds[name])[()] for name, x in there.items()})
        with np.errstate(all="ignore"):
            # A test may have put a state of arrays there.
            self.state, decision = self._step(self._convert(self.state), given)
        return decision

    def feed(self, **signals: Any) -> list[Decision]:
        """Feeds sequences of one length; returns the decisions."""
        names = list(signals)
        return [
            self.step(**dict(zip(names, each, strict=True)))
            for each in zip(*signals.values(), strict=True)
        ]


def watching(name: str, *rules: RuleConfig, **settings: Any) -> EngineConfig:
    """A config with one detector, its thresholds and rules; unlimited skips, no grace window."""
    config = DETECTORS[name](**settings)
    return EngineConfig(detectors=((name, config),), rules=rules, max_skips=1 << 20, grace_steps=0)


def same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(leaves(a), leaves(b), strict=True))


def flags(decisions: list[Decision], flag: Cause | Action) -> np.ndarray:
    """At which steps a cause was set or an action ordered: (steps,) or (steps, lanes)."""
    name = "cause" if isinstance(flag, Cause) else "action"
    return np.array([(getattr(each, name) & int(flag)) != 0 for each in decisions])
