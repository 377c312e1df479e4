"""torch.compile: of the user's step, and of the device engine's."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from healcore.torch import attach, engines
from tests.torch import policies
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.optimizer_cases import FUSED, NAN, Case, Where, host_and_device

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="torch.compile needs a C++ compiler on a CPU, and there is none",
)
FACTORS = [1.0, 1.0, 1.0, 1.0, NAN, 1.0, 1e5, 1.0]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Other tests' graphs do not count towards the recompilation limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def run(case: Case, heal_with: Any, where: Where, compiled: bool) -> tuple[dict, dict]:
    optimizer = case.build()
    heal = attach(optimizer, heal_with, engine=where)
    if compiled:
        optimizer.step = torch.compile(optimizer.step)  # type: ignore[method-assign]
    for i, factor in enumerate(FACTORS):
        case.step(optimizer, i, heal=heal, factor=factor)
    return snapshot(optimizer), heal.state_dict()


@host_and_device
@pytest.mark.parametrize(
    "case",
    [c for c in FUSED if c.name in ("AdamW-fused", "SGD-fused-momentum")]
    + [Case("SGD", torch.optim.SGD, {"foreach": True})],
    ids=lambda case: case.name,
)
def test_a_compiled_step_clips_and_skips_as_an_eager_one(case: Case, where: Where):
    engine = policies.fixed(4.0)
    engine = type(engine)(engine.config._replace(detectors=policies.SKIPS.config.detectors))
    eager, compiled = run(case, engine, where, False), run(case, engine, where, True)
    assert eager[1]["state"]["tally"]["skips"] == 2
    assert eager[1]["state"]["tally"]["clips"] > 0
    assert compiled[1]["state"]["tally"] == eager[1]["state"]["tally"]
    if case.fused:
        assert compiled[1] == eager[1]
        assert_same(compiled[0], eager[0])  # the same kernel; Inductor writes its own for others


def test_the_compiled_engine_decides_as_the_eager_one():
    case = Case("", torch.optim.AdamW, {"fused": True})
    runs = []
    for compiled in (False, True):
        optimizer = case.build()
        heal = attach(optimizer, policies.CUTS, engine="device", compile=compiled)
        assert heal.report().compiled is compiled
        for i, factor in enumerate(FACTORS):
            case.step(optimizer, i, heal=heal, factor=factor)
        assert heal.report().compiled is compiled  # has not fallen back
        runs.append((snapshot(optimizer), heal.state_dict()))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_a_compiler_that_fails_has_a_warning_and_eager_steps(monkeypatch: pytest.MonkeyPatch):
    def missing(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    def compiled(step: Any) -> Any:
        return torch.compile(step, fullgraph=True, backend=missing)

    case = Case("", torch.optim.AdamW, {"fused": True})
    optimizer = case.build()
    monkeypatch.setattr(engines, "_compiled", compiled)
    heal = attach(optimizer, policies.SKIPS, engine="device", compile=True)
    with pytest.warns(RuntimeWarning, match="no compiler here"):
        case.step(optimizer, 0, heal=heal)
    case.step(optimizer, 1, heal=heal, factor=NAN)
    assert not heal.report().compiled
    state = heal.state_dict()["state"]
    assert (state["step"], state["tally"]["skips"]) == (2, 1)
