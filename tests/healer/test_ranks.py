"""Two ranks that see different things do the same, and neither waits forever.

A rank is this file as a program, see `forked_ranks`. The faults are on rank 1 only.
"""

import hashlib
import io
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from healcore import Checkpoints, Healer
from healcore.core.decision import Action
from healcore.events import read
from healcore.runtime.run.ending import exits
from tests.healer.run_options import grouped
from tests.healer.test_faults import Corrupt
from tests.healer.training_loops import Faults, rules, with_answers
from tests.open_run import run_of
from tests.runtime.store.disk_faults import flip
from tests.torch.forked_ranks import Worlds, folder, serve, worlds_of
from tests.torch.layouts import spread, whole

BAD = 23
TOLD = 21
"""Step of a proposal; the ranks vote two steps later, between two regular saves."""
CORRUPT = (20, 39)
"""Batches that rank 1 cannot read: one that comes again after the rollback, and the last."""
LOST = "a lost connection"
PREPARED = "a lost connection, Accelerate"
"""Accelerate exchanges the state of a generator between the ranks when an epoch begins."""
TROUBLE = "terminated in trouble"
"""The scenario in which the last step, not read yet when the run ends, orders a rollback."""


class Rows(Corrupt, Sequence):
    """A loader that can be rewound."""


class Interrupted(Rows):
    """Loses the connection at some of the batches, the first two times that each is read."""

    def __init__(self, count: int, lost: Iterable[int]) -> None:
        super().__init__(count, ())
        self.left = dict.fromkeys(lost, 2)

    def __getitem__(self, index: int) -> int:
        if self.left.get(index):
            self.left[index] -= 1
            raise ConnectionResetError(104, "Connection reset by peer")
        return super().__getitem__(index)


def does_not_list(healer: Any) -> None:
    """This rank's view of the checkpoints lacks one."""
    store, every = run_of(healer).store, run_of(healer).store.checkpoints
    store.checkpoints = lambda: [each for each in every() if each.step != 15]


def forgets(healer: Any) -> None:
    """This rank's memory has lost the snapshots that the other one's has."""
    run_of(healer).store.join()
    run_of(healer).store.copies = {}


def loses_a_shard(healer: Any) -> None:
    """Both memories are empty, and rank 1's part of the newest checkpoint is damaged on disk."""
    run_of(healer).store.wait()
    forgets(healer)
    if dist.get_rank() == 1:
        root: Any = run_of(healer).store.root
        (shard,) = root.glob("step-*15.*/**/__1_0.distcp")
        flip(shard, 4 * shard.stat().st_size)
    dist.barrier()


def propose(healer: Any) -> None:
    for why in ("the device is needed", "signal 15"):
        run_of(healer).end_requests.propose(why)


def stop_file(healer: Any) -> None:
    found: Any = run_of(healer).end_requests
    found.stop_path.touch()
    while not found.stop_file_found:
        time.sleep(0.01)


ODD: dict[str, Any] = {
    "listing": does_not_list,
    "forgets": forgets,
    "shard": loses_a_shard,
}
"""Scenario -> what happens to rank 1 before the step with NaN, which only rank 1 sees."""
ENDS: dict[str, Any] = {
    TROUBLE: lambda healer: os.kill(os.getpid(), signal.SIGTERM),
    "interrupted": lambda healer: os.kill(os.getpid(), signal.SIGINT),
    "stop file": stop_file,
    "proposed": propose,
}
"""Scenario -> what happens to rank 1 before the step TOLD, which ends the run on both."""
HOOKS = [lambda incident: Action(0), lambda incident: Action.STOP]
"""The hook of each rank in the scenario "severe"."""
SCENARIOS = [*ODD, "severe", "unreadable", LOST, *ENDS]
REFUSED = "other options"


def run(scenario: str) -> dict[str, Any]:
    rank = dist.get_rank()
    root = folder() / scenario
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model, _ = spread("FSDP2" if scenario == "shard" else "DDP", net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    bad = [TOLD + 1] if scenario == TROUBLE else []
    faults = Faults(always=bad if scenario in ENDS else [BAD])
    at, happens = (TOLD, ENDS[scenario]) if scenario in ENDS else (BAD, ODD.get(scenario))
    options: dict[str, Any] = {"store": root / "store", "events": root / "run.events.jsonl"}
    policy = rules()
    data = range(40)
    if scenario == "unreadable":
        policy = with_answers()
        data = Rows(40, CORRUPT if rank else ())
    if scenario == LOST:
        policy = with_answers(retry={"base_delay_s": 1e-3, "max_delay_s": 1e-3})
        data = Interrupted(40, CORRUPT if rank else ())
    if scenario == "stop file":
        options["stop_file"] = root / f"stop on rank {rank}"
    if scenario == "severe":
        options["on_incident"] = HOOKS[rank]
    stopped = None
    state = {"model": net, "optimizer": optimizer}
    try:
        with (
            redirect_stderr(io.StringIO()) as said,
            Healer(policy, state=state, **grouped(options, save_every=5)) as healer,
        ):
            for number in healer.batches(data):
                if number == at and happens and (rank == 1 or scenario == "shard"):
                    happens(healer)
                inputs, targets = map(torch.from_numpy, faults.batch(number))
                if rank == 0 and scenario in (*ODD, "unreadable", LOST):
                    targets = torch.nan_to_num(targets)  # the fault is on rank 1 only
                half = slice(rank, None, 2)
                loss = (model(inputs[half]) - targets[half]).square().mean()
                healer.observe(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if number in bad:
                    net[0].weight.data.fill_(float("nan"))  # type: ignore[operator]
    except exits.RunStopped as stop:
        stopped = stop.why
    except (exits.Terminated, exits.Interrupted, exits.EndRequested) as end:
        stopped = f"exit status {end.code}"
    weights = b"".join(whole(p).numpy().tobytes() for p in net.parameters())
    lines = [rf"rank 1: step \d+: batch {each} of epoch 0 cannot be read" for each in CORRUPT]
    return {
        "root": str(root),
        "stopped": stopped,
        "step": healer.step,
        "rollbacks": healer.rollbacks,
        "order": faults.order if scenario != "unreadable" else len(faults.order),
        "corrupt": [n for n in CORRUPT if rank and n in faults.order and scenario == "unreadable"],
        "weights": hashlib.sha256(weights).hexdigest(),
        "named": rank == 0 or [bool(re.search(line, said.getvalue())) for line in lines],
    }


def refused() -> str:
    """The error of a Healer whose policy and distance of saves are others on rank 1."""
    net = torch.nn.Linear(4, 1)
    rank = dist.get_rank()
    state = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    other: dict[str, Any] = {"store": folder() / "other"}
    other["checkpoints"] = Checkpoints(every=5 + rank)
    with pytest.raises(ValueError, match="than rank") as error:
        Healer(rules(recoveries=3 + rank), state=state, **other).__enter__()
    return str(error.value)


class Requests(Corrupt):
    """Rows of which some requests fail."""

    def __init__(self, count: int, failing: Iterable[int]) -> None:
        super().__init__(count, ())
        self.failing, self.requests = failing, 0

    def __getitem__(self, index: int) -> int:
        self.requests += 1
        if self.requests in self.failing:
            raise ConnectionResetError(104, "Connection reset by peer")
        return super().__getitem__(index)


def prepared() -> list[list[int]]:
    """The rows of two epochs on this rank, of which rank 1 loses the connection twice."""
    rank = dist.get_rank()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    torch.manual_seed(rank)
    rows = Requests(24, (5, 19) if rank else ())
    loader = accelerator.prepare_data_loader(
        DataLoader(rows, batch_size=2, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
    )
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    policy = with_answers(retry={"base_delay_s": 1e-3, "max_delay_s": 1e-3})
    used: list[list[int]] = []
    with Healer(policy, state={"model": model, "optimizer": optimizer}) as healer:
        for batch in healer.batches(loader, epochs=2):
            used.append(batch)
            loss = model(torch.tensor(batch, dtype=torch.float32)[:, None]).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert rows.requests > 24 or not rank
    return used


def outcome(scenario: str) -> Any:
    others = {REFUSED: refused, PREPARED: prepared}
    return others[scenario]() if scenario in others else run(scenario)


worlds = worlds_of("tests.healer.test_ranks", 600)
Of = Callable[[str], dict[str, Any]]
"""Takes the name of a scenario; returns its outcome, which must be the same on both ranks."""


@pytest.fixture
def of(worlds: Worlds) -> Of:
    def same(scenario: str) -> dict[str, Any]:
        first, second = worlds.of(2, [], scenario)
        named = first.pop("named"), second.pop("named")
        assert first == second
        return {**first, "named": named[1]}

    return same


def events_of(found: dict[str, Any]) -> list[Any]:
    return read(Path(found["root"]) / "run.events.jsonl").events


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "target"),
    [("listing", 10), ("forgets", 15), ("shard", 10)],
)
def test_both_go_back_to_the_newest_common_step(scenario, target, of):
    logged = of(scenario)
    assert logged["rollbacks"] == 1
    assert logged["step"] == 39
    assert logged["order"].count(BAD) == 1
    assert len([*Path(logged["root"]).glob("*events*.jsonl")]) == 1
    events = events_of(logged)
    assert [e["checkpoint"] for e in events if e["kind"] == "rollback"] == [target]
    begun = next(e for e in events if e["kind"] == "alarm" and e["incident"])
    losses = [float(each["loss"]) for each in begun["of_ranks"]]
    assert [math.isnan(loss) for loss in losses] == [False, True]


def test_other_options_on_the_ranks_are_refused_on_each(worlds: Worlds):
    for rank, text in enumerate(worlds.of(2, [], REFUSED)):
        assert text.startswith(f"rank {1 - rank} has another policy, save_every than rank {rank}:")


def test_the_most_severe_of_two_hooks_wins(of):
    severe = of("severe")
    assert "hook" in severe["stopped"]
    assert severe["rollbacks"] == 0


def test_a_batch_that_one_rank_cannot_read_is_replaced_and_both_have_as_many(of):
    """Without a replacement one rank would wait for a last step."""
    logged = of("unreadable")
    assert (logged["stopped"], logged["rollbacks"], logged["step"]) == (None, 1, 39)
    assert (logged["corrupt"], logged["named"]) == ([], [True, True])


def test_a_batch_that_one_rank_reads_again_is_trained_by_both(of):
    """The other rank waits in the step."""
    logged = of(LOST)
    assert (logged["stopped"], logged["rollbacks"], logged["step"]) == (None, 1, 39)
    assert set(logged["order"]) == {*range(40)}
    assert logged["order"].count(BAD) == 1


def test_a_rank_that_reads_again_exchanges_nothing(worlds: Worlds):
    """Its loader of Accelerate begins again, and would wait for an exchange with the other one."""
    both = worlds.of(2, [], PREPARED)
    assert [len(each) for each in both] == [12, 12]
    for epoch in (slice(6), slice(6, 12)):
        rows = [row for used in both for batch in used[epoch] for row in batch]
        assert sorted(rows) == [*range(24)]


@pytest.mark.parametrize(
    ("scenario", "status", "steps", "ending"),
    [("interrupted", 130, 2, "interrupted"), ("stop file", 0, 3, "requested")],
)
def test_a_signal_or_stop_file_of_one_rank_ends_both_at_one_step_with_its_save(
    scenario, status, steps, ending, of
):
    """The mark of a signal is read a step later; the mark of a file with the next step."""
    logged = of(scenario)
    at = TOLD + steps
    assert (logged["stopped"], logged["step"]) == (f"exit status {status}", at)
    events = events_of(logged)
    vote = next(e for e in events if "the ranks end together" in e.get("why", ""))
    assert vote["step"] == at
    assert "rank 1 " in vote["why"]
    assert [e["step"] for e in events if e["kind"] == "save" and e["why"] == "last"] == [at]
    assert (events[-1]["kind"], events[-1]["ending"]) == ("end", ending)
    (postmortem,) = Path(logged["root"]).glob("*postmortem*.json")
    named = f"the stop file {logged['root']}/stop on rank 1" in postmortem.read_text()
    assert named == (scenario == "stop file")


def test_damage_by_the_last_step_is_undone_by_both_before_they_end(of):
    """The next start could not resume from weights that are not finite."""
    logged = of(TROUBLE)
    assert (logged["stopped"], logged["rollbacks"]) == ("exit status 143", 1)
    events = events_of(logged)
    (rollback,) = (e for e in events if e["kind"] == "rollback")
    assert (rollback["step"], logged["step"]) == (TOLD + 2, rollback["checkpoint"])
    assert (events[-1]["kind"], events[-1]["ending"]) == ("end", "signal")


def test_a_proposal_to_end_is_carried_out_by_all(of):
    logged = of("proposed")
    assert (logged["stopped"], logged["step"]) == ("exit status 0", TOLD + 2)
    (vote,) = (e for e in events_of(logged) if "the ranks end together" in e.get("why", ""))
    assert vote["step"] == TOLD + 2
    assert "the device is needed" in vote["why"]


if __name__ == "__main__":
    serve(outcome, seconds=600, cases=[*SCENARIOS, REFUSED, PREPARED])
