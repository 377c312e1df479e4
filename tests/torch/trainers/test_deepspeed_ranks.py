"""Two ranks under DeepSpeed, ZeRO stages 0, 1 and 2: what one rank sees, both act on.

A rank is `python -m tests.torch.trainers.test_deepspeed_ranks RANK PORT FOLDER`. It prints a JSON
line for each kind of engine. The faults are on rank 1 only.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from itertools import pairwise
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
    digests, norms = [digest(loop)], []
    for i in range(8):
        loop.step(i, NAN if i == 5 and rank == 1 else 1.0)
        heal.judge_dropped()
        norms.append(float(heal.metrics()["heal/grad_norm"]))
        digests.append(digest(loop))
    return {"digests": digests, "norms": norms, "skips": int(heal.metrics()["heal/skips"])}


def rollback(config: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 has two bad micro-batches the first time; then the run goes back on both."""
    found: dict[str, Any] = {"rollbacks": [], "back": None}
    traces: list[dict[tuple[int, int], str]] = []
    for bad in (True, False):
        loop, trace = Loop(config), {}
        with Healer(
            policies.ROLLS_BACK,
            state=engine_state(loop.engine),
            store=folder / str(bad),
            checkpoints=Checkpoints(every=2),
        ) as healer:
            for i in healer.batches(list(range(20))):
                if healer.rollbacks and found["back"] is None:
                    found |= {"back": digest(loop), "step": healer.step}
                trace.setdefault((healer.step, i), digest(loop))
                broken = bad and rank == 1 and i in (12, 13) and not healer.rollbacks
                loop.micro_step(i, NAN if broken else 1.0)
        traces.append(trace)
        found["rollbacks"].append(healer.rollbacks)
    return found | {"reference": traces[1][found["step"], 2 * found["step"]]}


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
def test_what_one_rank_sees_both_act_on(kind: str, ranks: Any):
    """A NaN skips the step on both. Both return to the weights of a run without the bad batch."""
    (nan, back), second = ((each["one_nan"], each["rollback"]) for each in ranks[kind])
    assert (nan, back) == second
    assert [a == b for a, b in pairwise(nan["digests"])] == [i == 5 for i in range(8)]
    assert nan["skips"] == 1
    assert back["rollbacks"] == [1, 0]
    assert back["step"] > 0
    assert back["back"] == back["reference"]


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
