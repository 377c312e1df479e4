"""Ranks that are killed, under torchrun and without its cost: the job continues or ends, whole.

This file is a program too. With ROOT KILLS it forks the ranks of every start, prints what was
counted as lines of JSON, and ends with an error at the first thing that is not as it must be. With
KIND ROOT KILLS SEED it is one rank under torchrun.
"""

import itertools
import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from healcore import Healer
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.store import DCPStore
from tests import forked_programs
from tests.healer import killed_runs
from tests.healer.killed_runs import STEP, Aim, Kind, Watched, run_ranks
from tests.healer.training_loops import EVERY_5, rules
from tests.torch.layouts import held, part, spread, whole

pytestmark = pytest.mark.slow  # several processes; the ranks of test_ranks.py are in `make test`

WORLD = 2
BAD = (13, 14, 31)
"""Batches that are NaN, on rank 1 only."""


class OwnStep:
    """A state per rank, to see whether a checkpoint has the parts of one step."""

    per_rank = True

    def __init__(self) -> None:
        self.step = 0
        self.rank = dist.get_rank()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank, (state, self.rank)
        self.step = state["step"]


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(number)
    inputs = torch.from_numpy(rng.normal(size=(16, 4)).astype(np.float32))
    targets = torch.sin(inputs.sum(1, keepdim=True))
    return inputs, targets * float("nan") if number in BAD and rank == 1 else targets


def digest(*values: Any) -> str:
    """Digest of this rank's part of tensors, and of JSON values."""
    of = [part(x).detach().contiguous().numpy() if torch.is_tensor(x) else x for x in values]
    return killed_runs.digest(*of)


def train(kind: str, root: Path, watched: Watched, *, any_world: bool = False) -> None:
    """Trains to the end, and writes what each step did.

    `any_world`: with nothing that only the same number of ranks can restore, and the digests of
    whole tensors.
    """
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    model, _ = spread(kind, net)
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    own = OwnStep()
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    state |= {} if any_world else {"own": own}
    options: Any = {"state": state, "store": root / "store", "checkpoints": EVERY_5}
    with (
        (root / f"trace-{rank}").open("a", buffering=1) as trace,
        Healer(rules(recoveries=6), **options) as healer,
    ):
        for number in healer.batches(range(45)):
            assert any_world or own.step == healer.step, "a checkpoint is of different steps"
            tensors = [whole(t) if any_world else t for t in held(net, optimizer)]
            engines = digest(trainer_access_of(healer).driver.engines())
            digests = digest(*tensors, scheduler.state_dict()), engines
            trace.write(json.dumps([healer.rollbacks, healer.step, number, *digests]) + "\n")
            watched.begin(STEP)
            inputs, targets = batch(number, rank)
            half = slice(rank, None, world)
            loss = (model(inputs[half]) - targets[half]).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            own.step += 1
            watched.end(STEP)
        facts = {"step": healer.step, "rollbacks": healer.rollbacks}
    facts |= {"weights": digest(*net.parameters())}
    (root / f"end-{rank}.json").write_text(json.dumps(facts))


def check(root: Path) -> None:
    """Every checkpoint that the last start has left is intact, and of one step."""
    store = DCPStore(root / "store")
    for saved in store.checkpoints():
        store.verify(saved.step)
        _, *ranks = json.loads((Path(str(saved.path)) / "state.json").read_text())
        trees = [rank["own"]["tree"]["dict"] for rank in ranks]
        assert [dict(tree)["step"] for tree in trees] == [saved.step] * WORLD, (saved, trees)
    assert store.damaged() == [], store.damaged()


def start(kind: str, root: Path, watched: Watched) -> None:
    check(root)
    train(kind, root, watched)
    dist.destroy_process_group()


def other_worlds(kind: str, root: Path, worlds: Sequence[int]) -> dict[str, Any]:
    """A run that goes on with another number of ranks at each start; returns what they found."""
    found: dict[str, Any] = {"worlds": worlds, "resumed": []}
    seen: dict[tuple[int, int], Any] = {}
    for number, world in enumerate(worlds):
        aim = None if number == len(worlds) - 1 else Aim(STEP, 13)

        def target(rank: int, aim: Aim | None = aim) -> None:
            train(kind, root, Watched(root / f"phases-{rank}", aim), any_world=True)

        for trace in root.glob("trace-*"):
            trace.unlink()
        ended = run_ranks(root, world, target)
        assert ended.statuses == [-signal.SIGKILL if aim else 0] * world, ended
        steps = killed_runs.steps_of(root)
        if number:
            text = re.search(r"was saved by (\d) ranks, but this run has (\d):", ended.errors[0])
            assert text is not None, ended.errors[0]
            assert int(text[1]) in worlds[:number], text
            assert int(text[2]) == world, text
            # Batch, weights, moments and engines are those that the other ranks had there.
            _, rollbacks, step = min(steps, key=lambda each: each[1:])
            for rank in range(world):
                assert steps[rank, rollbacks, step] == seen[rollbacks, step], (rank, step)
            found["resumed"].append(step)
        seen |= {(each[1], each[2]): state for each, state in steps.items() if each[0] == 0}
    found["rollbacks"] = killed_runs.facts_of(root)[0]["rollbacks"]
    return found


def main(root: Path, kills: int) -> None:
    for name in ("DDP", "FSDP2"):
        counts = Counter[str]()
        kind = Kind(root / f"{name}-clean", partial(start, name), world=WORLD)
        for seed in itertools.count(1):
            left = kills - counts["kills"]
            if not left:
                break
            counts += kind.killed(root / f"{name}-killed-{seed}", left, seed)
        print(json.dumps(counts), flush=True)
    for kind, worlds in (("FSDP2", [2, 4, 1]), ("DDP", [1, 2])):
        print(json.dumps(other_worlds(kind, root / f"{kind}-worlds", worlds)), flush=True)


PROGRAM = "-m", "tests.healer.test_elastic"


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.stress)])
def test_a_rank_is_killed_again_and_again(kills, tmp_path):
    done = forked_programs.run(*PROGRAM, tmp_path, kills, timeout=600 + 60 * kills)
    assert done.returncode == 0, done.stderr[-3000:]
    ddp, fsdp, sharded, replicated = map(json.loads, done.stdout.splitlines())
    for counts in (ddp, fsdp):
        assert counts["kills"] == kills
        if kills > 3:  # a kill by a timer may miss the phase that it is meant for
            assert all(counts[f"in a {phase}"] for phase in ("rollback", "save", "step")), counts
    # Another number of ranks at every start.
    assert (sharded["worlds"], len(sharded["resumed"])) == ([2, 4, 1], 2)
    assert (replicated["worlds"], replicated["rollbacks"]) == ([1, 2], 2)


def test_torchrun_restarts_a_killed_rank_and_ends_when_it_may_no_more(tmp_path, monkeypatch):
    # See https://github.com/pytorch/pytorch/issues/167288.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setenv("PYTHONPATH", str(forked_programs.ROOT))  # the ranks import this module
    torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", WORLD
    rank = *PROGRAM, "DDP", tmp_path, 2, 3
    done = forked_programs.run(*torchrun, "--max-restarts", 1, *rank, timeout=720)
    assert done.returncode == 1, done.stderr[-3000:]
    assert done.stderr.count("failed (exitcode: -9)") == 2
    assert "healcore: resumes from the checkpoint" in done.stderr
    assert list((tmp_path / "store").glob("step-*/manifest.json"))


def under_torchrun(kind: str, root: str, kills: str, seed: str) -> None:
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=killed_runs.TIMEOUT))
    rank = dist.get_rank()
    aim = killed_runs.aim_of(seed, number, int(kills), WORLD)
    start(kind, Path(root), Watched(Path(root) / f"phases-{number}-{rank}", aim, rank))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        under_torchrun(*sys.argv[1:])
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]))
