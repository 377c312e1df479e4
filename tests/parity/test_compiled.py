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
        traces += [lockstep.scalar(whole(recorded_runs.lanes(100, norms=True)), 0)]
    lockstep.steps_equal(config, traces, (backend,), reference="recorded")


@pytest.mark.stress
@pytest.mark.parametrize("clip", [*policies.CLIPS, None])
def test_every_policy_compiled_whole(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    lanes = 64 if clip == "autoclip" else 512
    trace = fuzz.signals(np.random.default_rng(53), 2000, lanes, groups=groups)
    config = policies.full(clip)
    lockstep.steps_equal(config, [trace], ("torch-compiled",), groups=groups, lanes=lanes)


def whole(trace: Signals) -> Signals:
    """Recorded runs with every signal present, as in a fuzzed trace."""
    assert trace.loss is not None
    one = np.ones_like(trace.loss)
    none = np.zeros(one.shape, bool)
    return trace._replace(
        update_norm=one, eval_loss=np.nan * one, change_expected=none, learning_rate=one
    )
