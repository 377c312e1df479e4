"""The same signals through several backends at once, compared after every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from healcore.core.engine import Engine, EngineConfig
from healcore.core.signals import Signals
from tests.core import fuzz
from tests.parity import backends, compare

CHUNK = 50


def steps_equal(
    config: EngineConfig,
    traces: Iterable[Signals],
    against: Sequence[str],
    *,
    groups: int = 0,
    lanes: int = 0,
    reference: str = "numpy",
) -> int:
    """Runs each trace from a fresh state on every backend; all states and decisions have one value.

    Args:
        config: the policy.
        traces: each (steps, lanes) or, for `lanes` 0, (steps,).
        against: backends to compare with `reference`.
        groups: tensors, for per-tensor clipping.
        lanes: length of the batch axis; 0 for none.
        reference: the backend to compare with.

    Returns:
        Steps compared, one per lane.

    Raises:
        AssertionError: names the backend, the step and the leaf.
    """
    engine = Engine(config)
    runs = {name: backends.runner(name, engine) for name in (reference, *against)}
    compared = 0
    for trace in traces:
        fresh = engine.init(groups=groups, batch=(lanes,) if lanes else ())
        states = {name: backends.start(name, fresh) for name in runs}
        for start in range(0, backends.length(trace), CHUNK):
            chunk = fuzz.part(trace, start, start + CHUNK)
            seen = {}
            for name, run in runs.items():
                states[name], *seen[name] = run(states[name], chunk)
            for name in against:
                difference = compare.first_difference(tuple(seen[reference]), tuple(seen[name]))
                assert difference is None, f"{reference} and {name} from step {start}: {difference}"
            compared += backends.length(chunk) * max(lanes, 1)
    return compared


def scalar(trace: Signals, lane: int) -> Signals:
    """One lane, as a trace of 0-d signals."""
    columns = (None if part is None else np.ascontiguousarray(part[:, lane]) for part in trace)
    return Signals(*columns)
