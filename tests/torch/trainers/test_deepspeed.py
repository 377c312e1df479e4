"""Under DeepSpeed's engine, in one process and on two ranks: skips, clipping, rollbacks."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.torch import AttachError, engine_state, heal_engine
from tests.torch import policies
from tests.torch.forked_ranks import Worlds, folder, serve, worlds_of
from tests.torch.layouts import digest
from tests.torch.optimizer_cases import NAN
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.deepspeed_engines import FP16, KINDS, SCALED, Loop, prepare, zero

pytest.importorskip("deepspeed", reason="run by make test-deepspeed")

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
    with CountSyncs() as theirs:
        for i in range(5):
            plain.step(i)
    with CountSyncs() as ours:
        for i in range(5):
            loop.step(i)
    assert all(map(torch.equal, plain.weights, loop.weights))
    assert theirs.count == ours.count
    before, moments = loop.weights, loop.moments
    loop.step(5, factor)
    skipped = factor != 1.0
    assert all(map(torch.equal, before, loop.weights)) == skipped
    assert all(map(torch.equal, moments, loop.moments)) == skipped
    loop.step(6)
    assert not any(map(torch.equal, before, loop.weights))
    heal.judge_dropped()
    assert not heal.healed_step.measurer.losses.weight
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


def rollbacks(kind: str, root: Path, *, here: bool = True) -> Any:
    """Rollbacks, step, batch and weights of a run with a bad batch, and weights of one without."""
    counts: list[int] = []
    back: list[Any] = []
    traces: list[dict[tuple[int, int], str]] = []
    for bad in (True, False):
        loop = Loop(KINDS[kind])
        trace = {}
        with Healer(
            policies.ROLLS_BACK,
            state=engine_state(loop.engine),
            store=root / str(bad),
            checkpoints=Checkpoints(every=2),
            lr={"factor": 0.999},
        ) as healer:
            for i in healer.batches(list(range(24))):
                if healer.rollbacks and not back:
                    back = [healer.step, i, digest(loop.weights)]
                    assert loop.engine.global_steps == healer.step
                    assert loop.engine.micro_steps == 2 * healer.step
                trace.setdefault((healer.step, i), digest(loop.weights))
                harms = bad and here and i in (12, 13) and not healer.rollbacks
                loop.micro_step(i, NAN if harms else 1.0)
        assert all(bool(p.isfinite().all()) for p in loop.weights)
        counts.append(healer.rollbacks)
        traces.append(trace)
    return [counts, back, traces[1][back[0], back[1]]]


@every_kind
def test_a_rollback_restores_every_part(kind: str, tmp_path: Path):
    """Later steps equal the steps of a run without the bad batch."""
    counts, (_, _, weights), reference = rollbacks(kind, tmp_path)
    assert counts == [1, 0]
    assert weights == reference


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(zero(3), "ZeRO-3", id="ZeRO-3"),
        pytest.param(
            {"zero_optimization": OFFLOADED, "zero_force_ds_cpu_optimizer": False},
            "offloading",
            id="offloading",
        ),
        pytest.param(
            {"zero_optimization": {"stage": 1, "compute_grad_norm": False}},
            "compute_grad_norm",
            id="without a norm",
        ),
        pytest.param(FP16, "fp16", id="fp16"),
    ],
)
def test_what_cannot_be_healed_is_refused(config: Any, reason: str):
    engine = Loop(config, groups=1).engine
    with pytest.raises(AttachError, match=reason):
        heal_engine(engine)
    assert "backward" not in vars(engine)


RANK_KINDS = ("float32", "ZeRO-1", "ZeRO-2, bfloat16")
worlds = worlds_of("tests.torch.trainers.test_deepspeed", 300)


def on_one_rank(kind: str) -> dict[str, Any]:
    """Rank 1 has a NaN at step 5; then two bad micro-batches, and the run goes back on both."""
    prepare(dist.get_rank(), 2)
    loop = Loop(KINDS[kind])
    odd = dist.get_rank() == 1
    heal = heal_engine(loop.engine, policies.SKIPS)
    digests = [digest(loop.weights)]
    norms = []
    for i in range(8):
        loop.step(i, NAN if i == 5 and odd else 1.0)
        heal.judge_dropped()
        norms.append(float(heal.metrics()["heal/grad_norm"]))
        digests.append(digest(loop.weights))
    skips = int(heal.metrics()["heal/skips"])
    back = rollbacks(kind, folder() / kind, here=odd)
    return {"digests": digests, "norms": norms, "skips": skips, "rollback": back}


@pytest.mark.parametrize("kind", RANK_KINDS)
def test_what_one_rank_sees_both_act_on(kind: str, worlds: Worlds):
    """A NaN skips the step on both. Both return to the weights of a run without the bad batch."""
    first, second = worlds.of(2, RANK_KINDS, kind)
    assert first == second
    assert [a == b for a, b in pairwise(first["digests"])] == [i == 5 for i in range(8)]
    assert first["skips"] == 1
    counts, (step, _, weights), reference = first["rollback"]
    assert counts == [1, 0]
    assert step > 0
    assert weights == reference


if __name__ == "__main__":
    serve(on_one_rank, seconds=300)
