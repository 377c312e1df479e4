"""One of two ranks that train together: python -m tests.healer.two_ranks RANK ROOT SCENARIO...

Prints a JSON line for each scenario: what this rank did. The faults are on rank 1 only.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from healcore import Checkpoints, Healer
from healcore.core.verdict import Action
from healcore.runtime.loop import termination
from healcore.runtime.loop.rank_group import Proposal
from healcore.runtime.loop.termination import EndRequested, Interrupted, RunStopped, Terminated
from healcore.runtime.store import Keep
from healcore.torch.store import MemoryStore as TorchMemoryStore
from tests.healer.run_options import grouped
from tests.healer.test_faults import Corrupt, with_answers
from tests.healer.training_loops import Faults, rules

BAD = 23
TOLD = 21
"""Step of a proposal; the ranks vote two steps later, between two regular saves."""
UNREADABLE = "unreadable"
"""The scenario in which rank 1 cannot read two batches."""
CORRUPT = (20, 39)
"""The first comes again after the rollback, and the second is the last."""
TROUBLE = "terminated in trouble"
"""The scenario in which the last step, not read yet when the run ends, orders a rollback."""
SHARDED = "shard"
"""The scenario in which each rank has a part of the model, which it saves itself."""
SECONDS = 60
"""After which a rank that waits for the other one shows where, and ends."""


class Rows(Corrupt, Sequence):
    """A loader that can be rewound."""


def does_not_list(healer: Healer, number: int) -> None:
    """This rank's view of the checkpoints lacks one."""
    if number == BAD:
        store: Any = healer._loop.saver.store
        steps = store.steps
        store.steps = lambda: [saved for saved in steps() if saved.step != 15]


def forgets(healer: Healer, number: int) -> None:
    """This rank's memory has lost the snapshots that the other one's has."""
    if number == BAD:
        healer._loop.saver.store.join()
        healer._loop.saver.store.ring.copies = {}


def rots(healer: Healer, number: int) -> None:
    """A bit of the newest snapshots in this rank's memory flips."""
    if number == BAD:
        store = healer._loop.saver.store
        store.join()
        for step, copy in store.ring.copies.items():
            if step >= 15:
                next(iter(copy.flat.leaves.values())).parts[""][0] ^= 1


def loses_a_shard(healer: Healer, number: int) -> None:
    """Both memories are empty, and this rank's part of the newest checkpoint is damaged on disk."""
    if number == BAD:
        store: Any = healer._loop.saver.store
        store.wait()
        forgets(healer, number)
        if dist.get_rank() == 1:
            (shard,) = store.root.glob("step-*15.*/**/__1_0.distcp")
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
        dist.barrier()


ODD: dict[str, Any] = {
    "agree": None,
    "listing": does_not_list,
    "forgets": forgets,
    "rots": rots,
    "without a disk": rots,
    SHARDED: loses_a_shard,
}
"""Scenario -> what happens to rank 1 before a step."""
HOOKS: dict[str, Any] = {
    "severe": [lambda incident: Action(0), lambda incident: Action.STOP],
    "milder": [lambda incident: None, lambda incident: Action(0)],
}
"""Scenario -> each rank's hook."""


def terminate(healer: Healer, number: int) -> None:
    """SIGTERM to this rank alone."""
    if number == TOLD:
        os.kill(os.getpid(), signal.SIGTERM)


def interrupt(healer: Healer, number: int) -> None:
    """Ctrl-C on this rank."""
    if number == TOLD:
        os.kill(os.getpid(), signal.SIGINT)


def propose(healer: Healer, number: int) -> None:
    """A report, and a proposal to end, on this rank."""
    if number == TOLD:
        healer._loop.ranks.propose(Proposal("a slow disk"))
        healer._loop.ranks.propose(Proposal("the device is needed", ends=True))


def stop_file(healer: Healer, number: int) -> None:
    """The stop file of this rank appears."""
    if number == TOLD:
        found = healer._loop.ranks.stop_file
        assert found.path is not None
        found.path.touch()
        while not found.found:
            time.sleep(0.01)


ENDS: dict[str, Any] = {
    "terminated": terminate,
    TROUBLE: terminate,
    "interrupted": interrupt,
    "stop file": stop_file,
    "proposed": propose,
}
"""Scenario -> what happens to rank 1 before a step, which ends the run on both."""


def run(scenario: str, root: Path) -> dict[str, Any]:
    """One whole healed run."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model: Any = fully_shard(net) if scenario == SHARDED else DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bad = [TOLD + 1] if scenario == TROUBLE else []
    faults = Faults(always=bad if scenario in ENDS else [BAD])
    odd = ENDS.get(scenario) or ODD.get(scenario)
    options: dict[str, Any] = {"store": root / "store", "events": root / "run.events.jsonl"}
    policy, data = rules(), range(40)
    if scenario == UNREADABLE:
        policy, data = with_answers(), Rows(40, CORRUPT if rank else ())
    if scenario == "stop file":
        options["stop_file"] = root / f"stop on rank {rank}"
    if scenario == "without a disk":
        options["store"] = TorchMemoryStore(Keep(good=3, candidates=3))
    if scenario in HOOKS:
        options["on_incident"] = HOOKS[scenario][rank]
    stopped, state = None, {"model": net, "optimizer": optimizer}
    try:
        with Healer(policy, state=state, **grouped(options, save_every=5)) as healer:
            for number in healer.batches(data):
                if odd is not None and (rank == 1 or scenario == SHARDED):
                    odd(healer, number)
                inputs, targets = map(torch.from_numpy, faults.batch(number))
                if rank == 0 and scenario in (*ODD, UNREADABLE):
                    targets = torch.nan_to_num(targets)  # the fault is on rank 1 only
                half = slice(rank, None, 2)
                loss = (model(inputs[half]) - targets[half]).square().mean()
                healer.observe(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    except RunStopped as stop:
        stopped = stop.why
    except (Terminated, Interrupted, EndRequested) as end:
        stopped = f"exit status {end.code}"
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in net.parameters()]
    weights = b"".join(p.detach().numpy().tobytes() for p in whole)
    return {
        "stopped": stopped,
        "step": healer.step,
        "rollbacks": healer.rollbacks,
        "order": faults.order if scenario != UNREADABLE else len(faults.order),
        "corrupt": [n for n in CORRUPT if n in faults.order]
        if rank and scenario == UNREADABLE
        else [],
        "weights": hashlib.sha256(weights).hexdigest(),
    }


def refusal(root: Path) -> str:
    """What a Healer says whose policy and distance of saves are others on rank 1."""
    net = torch.nn.Linear(4, 1)
    state = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    rank = dist.get_rank()
    try:
        other: dict[str, Any] = {
            "store": root / "other",
            "checkpoints": Checkpoints(every=5 + rank),
        }
        with Healer(rules(recoveries=3 + rank), state=state, **other):
            return ""
    except ValueError as error:
        return str(error)


def main(rank: int, root: Path, scenarios: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2
    )
    termination.POLL_INTERVAL_S = 0.01
    for scenario in scenarios:
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(json.dumps(run(scenario, root / scenario)), flush=True)
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    print(json.dumps(refusal(root)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
