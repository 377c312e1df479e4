"""One process under DeepSpeed's engine: a bad batch, a healthy run, clipping, rollback."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.torch import AttachError, engine_state, heal_engine
from tests.torch import policies
from tests.torch.optimizer_cases import NAN
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.deepspeed_engines import FP16, KINDS, SCALED, Loop, prepare, zero

pytest.importorskip("deepspeed", reason="run by .ci/run with DeepSpeed on its path")

every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module", autouse=True)
def one_process() -> None:
    """Stays for the whole program: DeepSpeed keeps the groups of the first setup."""
    prepare()


@every_kind
@pytest.mark.parametrize("factor", [NAN, 20.0])
def test_a_bad_step_is_skipped_in_every_group_and_changes_nothing(kind: str, factor: float):
    """DeepSpeed takes a finite spike; with ZeRO it steps each parameter group on its own."""
    loop = Loop(KINDS[kind])
    heal = heal_engine(loop.engine, policies.SKIPS)
    for i in range(8):
        before, moments = loop.weights, loop.moments
        loop.step(i, factor if i == 5 else 1.0)
        assert all(map(torch.equal, before, loop.weights)) == (i == 5)
        if i == 5:
            assert all(map(torch.equal, moments, loop.moments))
    heal.judge_dropped()
    assert not heal.has_loss
    assert int(heal.metrics()["heal/skips"]) == 1, "a loss that is NaN is no overflow"
    if factor == 20.0 or kind == SCALED:
        assert loop.engine.skipped_steps == (factor != 20.0)


@every_kind
def test_a_healthy_run_is_the_same_to_the_bit_and_waits_for_nothing_more(kind: str):
    found, syncs = [], []
    for policy in (None, policies.SKIPS):
        loop = Loop(KINDS[kind])
        heal = None if policy is None else heal_engine(loop.engine, policy)
        with CountSyncs() as counter:
            for i in range(6):
                loop.step(i)
        found.append(loop.weights)
        syncs.append(counter.count)
        assert heal is None or int(heal.metrics()["heal/skips"]) == 0
    assert all(map(torch.equal, *found))
    assert syncs[0] == syncs[1]


@every_kind
def test_the_policy_sees_the_norm_of_the_whole_step_before_clipping(kind: str):
    """And DeepSpeed's own limit stays in force."""
    norms, ends = [], []
    for clip, policy in ((0.0, policies.SKIPS), (0.05, None), (0.05, "default")):
        loop = Loop({**KINDS[kind], "gradient_clipping": clip})
        heal = None if policy is None else heal_engine(loop.engine, policy)
        loop.step(0)
        if heal is not None:
            norms.append(float(heal.metrics()["heal/grad_norm"]))
        ends.append(loop.weights)
    assert norms[0] == norms[1] > 1
    for theirs, ours in zip(ends[1], ends[2], strict=True):
        assert torch.allclose(theirs, ours, rtol=1e-2, atol=1e-6)


@every_kind
def test_a_rollback_restores_every_part(kind: str, tmp_path: Any):
    """The steps after it are those of a run that never saw the bad batch."""
    runs: dict[bool, Any] = {}
    for bad in (True, False):
        loop = Loop(KINDS[kind])
        engine, seen = loop.engine, []
        state = engine_state(engine)
        with Healer(
            policies.ROLLS_BACK,
            state=state,
            store=tmp_path / str(bad),
            checkpoints=Checkpoints(every=2),
            lr={"factor": 0.999},
        ) as healer:
            trace = []
            for i in healer.batches(list(range(24))):
                went_back = healer.rollbacks == 1 and not seen
                if went_back:
                    seen.append((healer.step, i))
                    assert engine.global_steps == healer.step
                    assert engine.micro_steps == 2 * healer.step
                trace.append((healer.step, i, loop.weights))
                loop.micro_step(i, NAN if bad and i in (12, 13) and not healer.rollbacks else 1.0)
        runs[bad] = healer, trace, seen
    healer, trace, seen = runs[True]
    assert healer.rollbacks == 1
    (step, batch) = seen[0]
    reference = {(s, i): w for s, i, w in runs[False][1]}
    first = next(w for s, i, w in trace[::-1] if (s, i) == (step, batch))
    assert all(map(torch.equal, first, reference[step, batch]))
    assert all(bool(p.isfinite().all()) for p in trace[-1][2])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (zero(3), "ZeRO-3"),
        (
            {
                "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
                "zero_force_ds_cpu_optimizer": False,
            },
            "offloading",
        ),
        ({"zero_optimization": {"stage": 1, "compute_grad_norm": False}}, "compute_grad_norm"),
        (FP16, "fp16"),
    ],
)
def test_what_cannot_be_healed_is_refused(config: Any, reason: str):
    engine = Loop(config, groups=1).engine
    with pytest.raises(AttachError, match=reason):
        heal_engine(engine)
    assert "backward" not in vars(engine)
