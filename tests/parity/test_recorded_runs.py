"""NumPy, JAX and torch take the same decisions on recorded training runs."""

from __future__ import annotations

import pytest

from healcore.core.clipping import RULES
from healcore.core.detectors import DETECTORS
from healcore.core.engine import EngineConfig
from tests.core import policies
from tests.core.oracle import core_run
from tests.parity import lockstep, recorded_runs

# Every threshold as it comes; the rules of the tests.
CONFIG = EngineConfig(
    clip=("zclip", RULES["zclip"]()),
    detectors=tuple((name, detector()) for name, detector in DETECTORS.items()),
    rules=policies.RULES_OF_ALL_KINDS,
)


@recorded_runs.needed
@pytest.mark.parametrize(
    ("norms", "rows", "against"),
    [
        (True, 200, ("jax-scalars", "torch")),
        (False, 200, ("torch",)),
        pytest.param(True, 700, ("jax-scalars", "torch"), marks=pytest.mark.stress),
        pytest.param(False, 700, ("jax-scalars", "torch"), marks=pytest.mark.stress),
    ],
)
def test_the_same_bits_on_every_recorded_run(norms, rows, against):
    """JAX with losses alone is in tests/tools/replay/test_backends."""
    trace = recorded_runs.lanes(rows, norms=norms)
    assert trace.loss is not None
    lockstep.steps_equal(CONFIG, [trace], against, lanes=trace.loss.shape[1])


@recorded_runs.needed
def test_something_happens_on_them():
    got = core_run(CONFIG, recorded_runs.lanes(200, norms=True))
    assert got["cause"].any()
    assert got["skip"].any()
    assert (got["grad_scale"] < 1).any()
