"""torch.compile of the user's step."""

import shutil
from typing import Any

import pytest
import torch

from healcore.core.engine import Engine
from healcore.torch import attach
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.optimizer_cases import FUSED, NAN, Case, host_and_device

pytestmark = [
    pytest.mark.slow,  # torch.compile takes most of the time
    pytest.mark.skipif(
        not any(map(shutil.which, ("g++", "clang++", "c++"))),
        reason="torch.compile needs a C++ compiler on a CPU, and there is none",
    ),
]
CASES = [
    *(case for case in FUSED if case.name in ("AdamW-fused", "SGD-fused-momentum")),
    Case("SGD", torch.optim.SGD, {"foreach": True}),
]
FACTORS = [1.0, 1.0, 1.0, 1.0, NAN, 1.0, 1e5, 1.0]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Other tests' graphs do not count towards the recompilation limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(case: Case, policy: Any, *, compiles_step: bool = False, **options: Any) -> Any:
    """Snapshot and state after the steps of `FACTORS`."""
    optimizer = case.build()
    heal = attach(optimizer, policy, **options)
    if compiles_step:
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    for i, factor in enumerate(FACTORS):
        case.step(optimizer, i, heal=heal, factor=factor)
    return snapshot(optimizer), heal.state_dict()


@host_and_device
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_compiled_step_clips_and_skips_as_an_eager_one(case: Case, where: Any):
    skips = policies.SKIPS.config.detectors
    engine = Engine(policies.fixed(4.0).config._replace(detectors=skips))
    (eager, state), (compiled, its_state) = (
        run(case, engine, engine=where, compiles_step=compiles) for compiles in (False, True)
    )
    assert state["state"]["tally"]["skips"] == 2
    assert state["state"]["tally"]["clips"] > 0
    assert its_state["state"]["tally"] == state["state"]["tally"]
    if case.fused:
        assert its_state == state
        assert_same(compiled, eager)  # the same kernel; Inductor writes its own for others
