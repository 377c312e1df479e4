"""torch.compile(fullgraph=True) gives NumPy's bits: one graph, no fallback to eager."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.engine import EngineConfig
from healcore.core.signals import Signals
from tests.core import fuzz, policies
from tests.parity import backends, lockstep, recorded_runs

reason = backends.missing("torch-compiled")
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

LANES = 256


@pytest.mark.parametrize(
    ("config", "backend"),
    [
        pytest.param(policies.clip_only("zclip"), "torch-compiled", id="clipping"),
        pytest.param(policies.full("zclip"), "torch-graph", id="everything, graph"),
        pytest.param(
            policies.full("zclip"), "torch-compiled", id="everything", marks=pytest.mark.stress
        ),
    ],
)
def test_with_scalars(config: EngineConfig, backend: str):
    """As a training step has it. Inductor takes some 40 seconds for every detector: `stress`."""
    trace = fuzz.signals(np.random.default_rng(52), 100, 1)
    traces = [lockstep.scalar(trace, 0)]
    if not recorded_runs.needed.args[0]:
        runs = widened(recorded_runs.lanes(100, norms=True))
        traces += [lockstep.scalar(runs, 0)]
    lockstep.steps_equal(config, traces, (backend,), reference="host")


@pytest.mark.stress
@pytest.mark.parametrize("clip", [*policies.CLIPS, None])
def test_every_policy_compiled_whole(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    lanes = 64 if clip == "autoclip" else 512
    trace = fuzz.signals(np.random.default_rng(53), 2000, lanes, groups=groups)
    config = policies.full(clip)
    lockstep.steps_equal(config, [trace], ("torch-compiled",), groups=groups, lanes=lanes)


def widened(trace: Signals) -> Signals:
    """Recorded runs in the shape of a fuzzed trace: more (skipped) lanes, every signal present."""
    assert trace.loss is not None
    steps, lanes = trace.loss.shape
    pad = ((0, 0), (0, LANES - lanes))
    loss, norm, skipped = (
        np.pad(part, pad, constant_values=1)
        for part in (trace.loss, trace.grad_norm, trace.externally_skipped)
    )
    none = np.zeros((steps, LANES), bool)
    nan = np.full((steps, LANES), np.nan, np.float32)
    one = np.ones_like(loss)
    return Signals(loss, norm, one, nan, None, none, skipped, learning_rate=one)
