"""One of two ranks under DeepSpeed: python -m tests.torch.trainers.deepspeed_rank RANK PORT FOLDER.

Prints a JSON line for each kind of engine. The faults are on rank 1 only.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from healcore.runtime.healer import Healer
from healcore.torch import engine_state, heal_engine
from tests.torch import policies
from tests.torch.optimizer_cases import NAN
from tests.torch.trainers.deepspeed_engines import BF16, Loop, prepare, zero
from tests.torch.trainers.first_nan import ROLLS_BACK

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


def loss_spike(config: dict[str, Any], rank: int) -> dict[str, Any]:
    """The loss of rank 1 jumps at step 8, its gradient does not."""
    loop = Loop(config, accumulate=1)
    heal = heal_engine(loop.engine, policies.LOSSES)
    hooks: Any = heal.hooks
    hooks.changes.close()  # the loop observes by itself
    for i in range(12):
        heal.observe(1.0 + 0.01 * (i % 3) + (1e4 if i == 8 and rank == 1 else 0.0))
        loop.micro_step(i)
    return {"skips": int(heal.metrics()["heal/skips"]), "weights": digest(loop)}


def rollback(config: dict[str, Any], rank: int, folder: Path) -> dict[str, Any]:
    """Rank 1 has two bad micro-batches the first time; then the run goes back on both."""
    ends, at = [], []
    for bad in (True, False):
        loop = Loop(config)
        state = engine_state(loop.engine)
        store = folder / str(bad)
        went = seen = None
        with Healer(ROLLS_BACK, state=state, store=store, save_every=2) as healer:
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


def main() -> None:
    """Run every kind."""
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    rank, port, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    prepare(rank, 2, port)
    for name, config in KINDS.items():
        found = {
            "kind": name,
            "one_nan": one_nan(config, rank),
            "loss_spike": loss_spike(config, rank),
            "rollback": rollback(config, rank, folder / name),
        }
        print(json.dumps(found), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
