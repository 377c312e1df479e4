"""Two ranks under DeepSpeed, ZeRO stages 0, 1 and 2: what one rank sees, both act on.

A rank is `python -m tests.torch.trainers.test_deepspeed_ranks RANK PORT FOLDER`. It prints a JSON
line for each kind of engine. The faults are on rank 1 only.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.torch import engine_state, heal_engine
from tests.torch import policies
from tests.torch.optimizer_cases import NAN
from tests.torch.trainers.deepspeed_engines import BF16, Loop, prepare, zero
from tests.torch.two_ranks import free_port, run_two_ranks

pytest.importorskip("deepspeed", reason="run by .ci/run with DeepSpeed on its path")

KINDS = {"float32": {}, "ZeRO-1": zero(1), "ZeRO-2, bfloat16": {**zero(2), **BF16}}
SECONDS = 300
"""After which a rank that waits for the other one shows where, and ends."""


def digest(loop: Loop) -> str:
    raw = b"".join(p.float().numpy().tobytes() for p in loop.weights)
    return hashlib.sha256(raw).hexdigest()


def one_nan(config: dict[str, Any], rank: int) -> dict[str, Any]:
    """Rank 1 has a NaN at step 5; what both did."""
    loop = Loop(config)
    heal = heal_engine(loop.engine, policies.SKIPS)
    changed, norms = [], []
    for i in range(8):
        before = digest(loop)
        loop.step(i, NAN if i == 5 and rank == 1 else 1.0)
        heal.judge_dropped()
        norms.append(float(heal.metrics()["heal/grad_norm"]))
        changed.append(digest(loop) != before)
    return {
        "changed": changed,
        "norms": norms,
        "skips": int(heal.metrics()["heal/skips"]),
        "weights": digest(loop),
    }


def rollback(config: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 has two bad micro-batches the first time; then the run goes back on both."""
    ends, at = [], []
    for bad in (True, False):
        loop = Loop(config)
        state = engine_state(loop.engine)
        store = folder / str(bad)
        went = seen = None
        with Healer(
            policies.ROLLS_BACK, state=state, store=store, checkpoints=Checkpoints(every=2)
        ) as healer:
            trace = {}
            for i in healer.batches(list(range(20))):
                if healer.rollbacks and went is None:
                    went, seen = healer.step, digest(loop)
                trace.setdefault((healer.step, i), digest(loop))
                broken = bad and rank == 1 and i in (12, 13) and not healer.rollbacks
                loop.micro_step(i, NAN if broken else 1.0)
        ends.append(trace)
        at.append((healer.rollbacks, went, seen, digest(loop)))
    _, went, seen, end = at[0]
    return {
        "rollbacks": [each[0] for each in at],
        "same": went is not None and seen == ends[1][went, 2 * went],
        "step": went,
        "end": end,
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By kind: what rank 0 and rank 1 have done."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    outputs = run_two_ranks(__name__, str(free_port()), folder, seconds=400)
    found: dict[str, list[dict[str, Any]]] = {}
    for out, err in outputs:
        lines = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        assert len(lines) == len(KINDS), err[-4000:]
        for line in lines:
            found.setdefault(line["kind"], []).append(line)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_on_one_rank_skips_the_step_on_both(kind: str, ranks: Any):
    first, second = (each["one_nan"] for each in ranks[kind])
    assert first == second
    assert first["changed"] == [i != 5 for i in range(8)]
    assert first["skips"] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_both_ranks_go_back_to_the_same_checkpoint(kind: str, ranks: Any):
    first, second = (each["rollback"] for each in ranks[kind])
    assert first == second
    assert first["rollbacks"] == [1, 0]
    assert first["step"] > 0
    assert first["same"], "not the weights of a run that never saw the bad batch"


if __name__ == "__main__":
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    prepare(rank, 2, port)
    for name, config in KINDS.items():
        found = {
            "kind": name,
            "one_nan": one_nan(config, rank),
            "rollback": rollback(config, rank, folder / name),
        }
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()
