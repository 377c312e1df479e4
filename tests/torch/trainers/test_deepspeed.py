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
@pytest.mark.parametrize("factor", [1.0, NAN, 20.0])
def test_only_a_bad_step_is_changed_and_nothing_waits(kind: str, factor: float):
    """A bad step changes nothing, in every group. The other steps are those without healcore."""
    plain, loop = Loop(KINDS[kind]), Loop(KINDS[kind])
    heal = heal_engine(loop.engine, policies.SKIPS)
    syncs = []
    for each in (plain, loop):
        with CountSyncs() as counter:
            for i in range(5):
                each.step(i)
        syncs.append(counter.count)
    assert all(map(torch.equal, plain.weights, loop.weights))
    assert syncs[0] == syncs[1]
    before, moments = loop.weights, loop.moments
    loop.step(5, factor)
    skipped = factor != 1.0
    assert all(map(torch.equal, before, loop.weights)) == skipped
    assert all(map(torch.equal, moments, loop.moments)) == skipped
    loop.step(6)
    assert not any(map(torch.equal, before, loop.weights))
    heal.judge_dropped()
    assert not heal.has_loss
    assert int(heal.metrics()["heal/skips"]) == skipped, "a loss that is NaN is no overflow"
    if kind == SCALED or factor == factor:  # DeepSpeed itself takes a finite spike
        assert loop.engine.skipped_steps == (factor != factor)


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
    runs: dict[bool, list[Any]] = {True: [], False: []}
    back = None
    for bad, trace in runs.items():
        loop = Loop(KINDS[kind])
        with Healer(
            policies.ROLLS_BACK,
            state=engine_state(loop.engine),
            store=tmp_path / str(bad),
            checkpoints=Checkpoints(every=2),
            lr={"factor": 0.999},
        ) as healer:
            for i in healer.batches(list(range(24))):
                if healer.rollbacks and back is None:
                    back = healer.step, i, loop.weights
                    assert loop.engine.global_steps == healer.step
                    assert loop.engine.micro_steps == 2 * healer.step
                trace.append((healer.step, i, loop.weights))
                loop.micro_step(i, NAN if bad and i in (12, 13) and not healer.rollbacks else 1.0)
        assert healer.rollbacks == bad
    assert back is not None
    reference = next(w for s, i, w in runs[False] if (s, i) == back[:2])
    assert all(map(torch.equal, back[2], reference))
    assert all(bool(p.isfinite().all()) for p in runs[True][-1][2])


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
