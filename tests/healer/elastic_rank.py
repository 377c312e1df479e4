"""One rank of a healed run whose ranks are killed with SIGKILL.

    torchrun … -m tests.healer.elastic_rank KIND ROOT KILLS SEED

KIND is DDP or FSDP2. ROOT holds the store, and of each rank a trace of what it has done. The first
KILLS starts end with one rank killing itself, at a moment that SEED and the number of the start
decide: in a step, in a save (the copy, or the write behind the loop), or in a rollback. The start
after those trains to the end. `elastic_runs.py` forks such ranks without torchrun.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import mmap
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from healcore import Checkpoints, Healer
from healcore.torch.store import DCPStore
from tests.healer.test_killed import BACK, SAVE, WRITE, watch_phases
from tests.healer.training_loops import rules

WORLD = 2
DATA, BAD = 45, (13, 14, 31)
"""Batches, and those that are NaN, on rank 1 only."""
SECONDS = 60
"""The time-out of the process group."""
PATIENCE = 120
"""Seconds after which a rank shows where it is, and ends: a failure of the test."""

STEP = "step"
PHASES = (STEP, SAVE, WRITE, BACK)
"""Between two exchanges of a step, the copy of the state, its write behind the loop, a rollback."""
LASTS = {STEP: 0.01, SAVE: 0.01, WRITE: 0.05, BACK: 0.05}
"""About how long each lasts, in seconds."""


Action = tuple[float, Callable[[], None]]


class Aim(NamedTuple):
    """Which rank kills itself, and when."""

    rank: int
    phase: str
    occurrence: int  # how often the phase has begun by then, from 1
    delay: float  # seconds after its beginning


def aim_of(seed: int, start: int, kills: int) -> Aim | None:
    """The aim of a start; None: nobody is killed."""
    if start >= kills:
        return None
    rng = random.Random(f"{seed}/{start}")
    phase = (BACK, WRITE, STEP, SAVE, BACK, WRITE)[start % 6]
    most = {STEP: 12, BACK: 1}.get(phase, 3)
    return Aim(rng.randrange(WORLD), phase, rng.randint(1, most), rng.random() ** 2 * LASTS[phase])


def die() -> None:
    """Kills this rank."""
    os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """Marks the phases under way in memory that outlives the process.

    `actions`: phase and occurrence -> seconds after its beginning, and what is called then.
    """

    def __init__(self, path: Path, actions: Mapping[tuple[str, int], Action]) -> None:
        path.write_bytes(bytes(len(PHASES)))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), len(PHASES))
        self._actions = actions
        self._begun: dict[str, int] = dict.fromkeys(PHASES, 0)
        watch_phases(self.begin, self.end)

    def begin(self, phase: str) -> None:
        """Marks a phase as under way."""
        self._shared[PHASES.index(phase)] = 1
        self._begun[phase] += 1
        found = self._actions.get((phase, self._begun[phase]))
        if found is not None:
            timer = threading.Timer(*found)
            timer.daemon = True
            timer.start()

    def end(self, phase: str) -> None:
        """Marks it as done."""
        self._shared[PHASES.index(phase)] = 0


def actions_of(aim: Aim | None) -> dict[tuple[str, int], Action]:
    """That of this rank, if it is the one."""
    if aim is None or aim.rank != dist.get_rank():
        return {}
    return {(aim.phase, aim.occurrence): (aim.delay, die)}


class OwnStep:
    """A state per rank, to see whether a checkpoint has the parts of one step."""

    per_rank = True

    def __init__(self) -> None:
        self.step, self.rank = 0, dist.get_rank()

    def state_dict(self) -> dict[str, int]:
        """Step and rank."""
        return {"step": self.step, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Checks that this rank gets its own."""
        assert state["rank"] == self.rank, (state, self.rank)
        self.step = state["step"]


def batch(number: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(16, 4) and (16, 1)."""
    rng = np.random.default_rng(number)
    inputs = torch.from_numpy(rng.normal(size=(16, 4)).astype(np.float32))
    targets = torch.sin(inputs.sum(1, keepdim=True))
    return inputs, targets * float("nan") if number in BAD and rank == 1 else targets


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def digest(*values: Any) -> str:
    """Of tensors and JSON values."""
    found = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.update(local(value).contiguous().numpy().tobytes())
        else:
            found.update(json.dumps(value, sort_keys=True).encode())
    return found.hexdigest()[:16]


def run(
    kind: str, root: Path, watched: Any, *, data: Any = range(DATA), any_world: bool = False
) -> dict[str, Any]:
    """Trains to the end, and writes what each step did.

    `any_world`: with nothing that only the same number of ranks can restore, and the digests of
    whole tensors.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    )
    model: Any = DistributedDataParallel(net) if kind == "DDP" else None
    if kind == "FSDP2":
        model = fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.manual_seed(rank)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    own = OwnStep()
    state: dict[str, Any] = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    state |= {} if any_world else {"own": own}
    with (
        (root / f"trace-{rank}").open("a", buffering=1) as trace,
        Healer(
            rules(recoveries=6), state=state, store=root / "store", checkpoints=Checkpoints(every=5)
        ) as healer,
    ):
        for number in healer.batches(data):
            assert any_world or own.step == healer.step, "a checkpoint is of different steps"
            moments = [m for s in optimizer.state.values() for m in s.values()]
            tensors = [*net.parameters(), *moments]
            if any_world:
                tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
            weights = digest(*tensors, scheduler.state_dict())
            engines = digest(healer._loop.driver.engines())
            trace.write(json.dumps([healer.rollbacks, healer.step, number, weights, engines]))
            trace.write("\n")
            watched.begin(STEP)
            inputs, targets = batch(number, rank)
            half = slice(rank, None, dist.get_world_size())
            loss = (model(inputs[half]) - targets[half]).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            own.step += 1
            watched.end(STEP)
        return {
            "step": healer.step,
            "rollbacks": healer.rollbacks,
            "weights": digest(*net.parameters()),
        }


def check(root: Path) -> None:
    """Every checkpoint that the last start has left is intact, and of one step."""
    store = DCPStore(root / "store")
    for saved in store.steps():
        store.verify(saved.step)
        parts = sorted(Path(str(saved.path)).glob("state-rank-*.json"))
        assert parts, saved
        trees = [json.loads(part.read_text())["own"]["tree"]["dict"] for part in parts]
        assert {dict(tree)["step"] for tree in trees} == {saved.step}, (saved, trees)
    assert store.damaged() == [], store.damaged()


def start(
    kind: str, root: Path, number: int, actions: Mapping[tuple[str, int], Action] | None = None
) -> None:
    """One start of this rank, the `number`-th of the run, in a process group that exists."""
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    rank = dist.get_rank()
    check(root)
    facts = run(kind, root, Watched(root / f"phases-{number}-{rank}", actions or {}))
    (root / f"end-{rank}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


def main(kind: str, root: Path, kills: int, seed: int) -> None:
    """As torchrun starts it."""
    number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS))
    start(kind, root, number, actions_of(aim_of(seed, number, kills)))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
