"""One of three ranks whose runs end on rank 1 first: python -m tests.healer.ending_ranks 0 ROOT.

Prints a JSON line for each case. The process group is unusable after a case, and made again.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from healcore.policy import load, to_dict
from healcore.runtime.healer import Healer
from healcore.runtime.loop import end_of_ranks, termination, unequal_batches
from healcore.torch.driver import rendezvous
from healcore.torch.driver.rendezvous import StoreRendezvous
from healcore.torch.store.gloo import GlooRanks
from tests.healer.training_loops import rules

WORLD, STEPS, AT = 3, 12, 7
SECONDS = 150
"""After which a rank that waits for the others shows where, and ends."""
GROUP = timedelta(seconds=1800)
"""torch's own time-out, which must not be what ends a wait."""
ABSENT_S, PATIENCE_S = 2.0, 0.5
"""How long ranks wait for one that does not come, and for data after a signal."""

CASES = (
    "forward", "FSDP2", "backward", "between", "update", "loader", "waits for data", "terminated",
    "stop", "absent", "slow disk", "leaves", "killed at the end",
    "unequal", "breaks",
)  # fmt: skip
"""What happens to rank 1 at step AT."""


GOES = ("leaves", "killed at the end")
"""Rank 2 has posted how it ends, and goes before it is asked to save; "leaves" says so."""

SAVES = load(rules(), respond=[*to_dict(rules())["respond"], {"to": ["unknown"], "do": ["save"]}])


WAIT_S = end_of_ranks.WAIT_S
STALL_S = 3.0
"""How long rank 0's disk stands still while a checkpoint is written."""


class Spoilt(Exception):
    """What the loop raises."""


class Loader:
    """Numbers; on rank 1 it waits or fails before one of them."""

    def __init__(self, case: str) -> None:
        self.case = case
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        while self.at < STEPS:
            if self.at == AT and dist.get_rank() == 1:
                if self.case == "waits for data":
                    threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
                    time.sleep(SECONDS)
                if self.case == "unequal":
                    return
                if self.case == "loader":
                    raise MemoryError("the loader has no memory")
            self.at += 1
            yield self.at - 1


class Optimizer(torch.optim.SGD):
    """Raises within an update, in the case "update"."""

    raises = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.raises:
            self.param_groups[0]["params"][0].add_(1.0)
            raise Spoilt("update")
        return super().step(closure)


def train(case: str, kind: str, store: Path) -> dict[str, Any]:
    """A run from its start or its checkpoint; `case` "": nothing happens to it."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    model: Any = fully_shard(net) if kind == "FSDP2" else DistributedDataParallel(net)
    optimizer = Optimizer(net.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 + rank)  # of the dropout
    state = {"model": net, "optimizer": optimizer}
    with Healer(SAVES, state=state, store=store, save_every=5) as healer:
        first = healer.step
        for number in healer.batches(Loader(case)):
            here = case if number == AT and rank == 1 else ""
            if case == "slow disk" and number == AT - 3:
                healer.store.wait()  # the next regular save is the one that the disk holds up
                if rank == 0:
                    stall_disk()
            if case == "absent" and number == AT and rank == 2:
                time.sleep(4 * ABSENT_S)
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
            if here in ("forward", "FSDP2", "absent", "slow disk", *GOES):
                raise Spoilt("forward")
            if here == "terminated":
                os.kill(os.getpid(), signal.SIGTERM)
            if here == "stop":
                healer.stop("the user has seen enough")
            loss = model(x).square().mean()
            healer.observe(loss)
            loss.backward()
            if here == "backward":
                raise Spoilt("backward")
            if here == "breaks":
                break
            optimizer.raises = here == "update"
            optimizer.step()
            optimizer.zero_grad()
            if case == "evaluates" and number == STEPS - 1 and rank == 0:
                time.sleep(1.0)  # alone, while the others have completed
            if here == "between":
                raise Spoilt("between")
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    weights = torch.cat([p.detach().flatten() for p in whole])
    return {"first": first, "weights": weights}


def run(case: str, rank: int, root: Path, undisturbed: dict[str, Any]) -> dict[str, Any]:
    """A run that ends on rank 1, and the one after it.

    `undisturbed` has the final weights of the runs to which nothing happens, by kind of model.
    """
    meet(root / f"{case}.1", rank)
    began, raised, code = time.monotonic(), "", 0
    try:
        with patched_ends(case):
            if case == "unequal":
                train("evaluates", case, root / "evaluates")
            train(case, case, root / case)
    except BaseException as error:
        raised = type(error).__name__
        status = getattr(error, "code", 1)
        code = status if isinstance(status, int) else 1
    took = time.monotonic() - began
    dist.destroy_process_group()
    meet(root / f"{case}.2", rank)
    resumed = train("", case, root / case)
    kind = case if case == "FSDP2" else "DDP"
    if kind not in undisturbed:
        undisturbed[kind] = train("", case, root / f"{kind} undisturbed")["weights"]
    dist.destroy_process_group()
    # DDP adds up in another order in the first step after a start.
    same = torch.allclose(resumed["weights"], undisturbed[kind], rtol=1e-5, atol=1e-6)
    return {"raised": raised, "code": code, "took": took, "resumed": resumed["first"], "same": same}


def stall_disk() -> None:
    """The disk of this rank stands still for a while."""
    sync, until = os.fsync, time.monotonic() + STALL_S
    os.fsync = lambda file: (time.sleep(max(0.0, until - time.monotonic())), sync(file))[1]


@contextmanager
def patched_ends(case: str) -> Iterator[None]:
    """A context in which ranks have the limits of this case, and rank 2 goes."""
    with pytest.MonkeyPatch.context() as patch:
        if case in ("unequal", "breaks"):
            patch.setattr(unequal_batches, "LOOK_S", 0.1)
        if case == "absent":
            patch.setattr(end_of_ranks, "WAIT_S", ABSENT_S)
        if case == "slow disk":
            patch.setattr(end_of_ranks, "_WRITES_S", 0.0)
        if case in GOES:
            patch.setattr(end_of_ranks, "WAIT_S", 2.0 * SECONDS)
            patch.setattr(rendezvous, "_SILENT_S", 1.0)
            if dist.get_rank() == 2:
                patch.setattr(end_of_ranks, "_save", lambda *_: "this rank goes")
            if dist.get_rank() == 2 and case == "killed at the end":
                patch.setattr(StoreRendezvous, "close", lambda self: self._closed.set())
        yield


def meet(file: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD, timeout=GROUP
    )


def overlapping_groups(rank: int, root: Path) -> list[list[int]]:
    """The ranks that this one meets in each of its pairs, in groups that overlap."""
    meet(root / "pairs", rank)
    pairs = [pair for pair in ((0, 1), (1, 2), (0, 2)) if rank in pair]
    found = [GlooRanks(members=pair).gather(rank) for pair in pairs]
    dist.destroy_process_group()
    return found


def main(rank: int, root: Path, cases: list[str]) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    print(json.dumps(["pairs", overlapping_groups(rank, root)]), flush=True)
    termination.PATIENCE_S, end_of_ranks._TOGETHER_S = PATIENCE_S, 0.2
    undisturbed: dict[str, Any] = {}
    for case in cases or CASES:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(json.dumps([case, run(case, rank, root, undisturbed)]), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
