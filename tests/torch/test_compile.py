"""torch.compile: of the user's step, and of the device engine's."""

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
    """Snapshot, state and handle after the steps of `FACTORS`."""
    optimizer = case.build()
    heal = attach(optimizer, policy, **options)
    if compiles_step:
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    for i, factor in enumerate(FACTORS):
        case.step(optimizer, i, heal=heal, factor=factor)
    return snapshot(optimizer), heal.state_dict(), heal


@host_and_device
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_compiled_step_clips_and_skips_as_an_eager_one(case: Case, where: Any):
    skips = policies.SKIPS.config.detectors
    engine = Engine(policies.fixed(4.0).config._replace(detectors=skips))
    (eager, state, _), (compiled, its_state, _) = (
        run(case, engine, engine=where, compiles_step=compiles) for compiles in (False, True)
    )
    assert state["state"]["tally"]["skips"] == 2
    assert state["state"]["tally"]["clips"] > 0
    assert its_state["state"]["tally"] == state["state"]["tally"]
    if case.fused:
        assert its_state == state
        assert_same(compiled, eager)  # the same kernel; Inductor writes its own for others


def test_the_compiled_engine_decides_as_the_eager_one():
    (eager, state, heal), (compiled, its_state, its_heal) = (
        run(CASES[0], Engine(policies.CUTS.config), engine="device", compile=compiles)
        for compiles in (False, True)
    )
    assert not heal.live_engine.compiled
    assert its_heal.live_engine.compiled  # has not fallen back
    assert_same(eager, compiled)
    assert state == its_state


def test_a_compiler_that_fails_has_a_warning_and_eager_steps(monkeypatch: pytest.MonkeyPatch):
    def missing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    def without_compiler(step: Any, **options: Any) -> Any:
        return compile_step(step, fullgraph=True, backend=missing)

    case = CASES[0]
    engine = Engine(policies.SKIPS.config)
    compile_step = torch.compile
    monkeypatch.setattr(torch, "compile", without_compiler)
    optimizer = case.build()
    heal = attach(optimizer, engine, engine="device", compile=True)
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        case.step(optimizer, 0, heal=heal)
    case.step(optimizer, 1, heal=heal, factor=NAN)
    assert not heal.live_engine.compiled
    assert heal.state_dict()["state"]["tally"]["skips"] == 1
