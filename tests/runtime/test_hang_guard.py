"""Steps that never return are reported with their stacks, and ended on request.

The runs are this file as a program: python -m tests.runtime.test_hang_guard ROOT. With several
ranks only rank 1 hangs, and the others wait for it in an all_reduce.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import urllib.error
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import healcore
from healcore.core.decision import Cause
from healcore.events import read
from healcore.runtime import hang_guard
from healcore.runtime.hang_guard import EXIT_STATUS
from healcore.runtime.healer import Healer
from tests import forked_programs
from tests.events.sample_events import problems
from tests.healer.killed_runs import forked
from tests.healer.run_directory import events, postmortems
from tests.runtime.faults.fault_page import assert_on_the_page

pytestmark = pytest.mark.slow  # several processes that wait for their limits

BOUND_S = 1200
"""After which a test fails. How long it takes depends on what else runs, and is not asserted."""
RUNS = {
    "python": 1, "slow": 1, "preset": 1, "healthy": 1, "waits": 1, "sleeps": 2, "stopped": 3,
}  # fmt: skip
"""How the process or rank 1 hangs, or that it only takes long -> number of ranks."""
HANGS_AT = 5
LIMIT = 1.0
"""Seconds that a step may take."""
HEALTHY = 4.0
"""The same in a healthy run, whose steps a busy machine may delay."""
HANG_RULE = {"to": ["hang"], "do": ["stop"]}
ENDS = {"respond": [HANG_RULE]}
OPTIONS: dict[str, dict[str, Any]] = {
    "slow": {"mode": "observe"},
    "preset": {},
    "waits": {"respond": [HANG_RULE, {"to": ["network"], "do": ["retry"]}]},
}
"""What differs from a policy that ends a process that hangs."""


def hang(how: str, folder: Path) -> None:
    """Never returns, unless it is only slow."""
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how in ("slow", "preset"):
        while not events(folder, "fault"):
            time.sleep(0.05)
    elif how == "sleeps":
        time.sleep(1000)
    while how == "python":
        pass


def asks_a_server(healer: Healer[Any], limit: float) -> None:
    """Calls a server that has a limit of its rate, and asks for a wait of several time-outs."""
    answers = [429, 200]

    def call() -> None:
        status = answers.pop(0)
        if status != 200:
            headers: Any = {"Retry-After": str(round(4 * limit))}
            raise urllib.error.HTTPError("http://server", status, "too many", headers, None)

    healcore.retrying(call, healer)()
    assert not answers


def train(how: str, folder: Path, rank: int) -> None:
    """Trains 10 steps; at step HANGS_AT it does what `how` says."""
    faulthandler.dump_traceback_later(1000, exit=True)
    limit = HEALTHY if how in ("healthy", "waits") else LIMIT
    world = RUNS[how]
    if world > 1:
        hang_guard.REPORT_TIMEOUT_S = 600.0
        at = f"file://{folder}.rendezvous"
        dist.init_process_group("gloo", init_method=at, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    options: dict[str, Any] = {"hang": {"timeout_s": limit}, **OPTIONS.get(how, ENDS)}
    options |= {"rollback": {"probation": 1}, "checkpoints": healcore.Checkpoints(every=2)}
    healer: Any = Healer("default", state=state, store=folder, **options)
    with healer:
        for number in healer.batches(range(10)):
            time.sleep(0.05)
            if number == 0 and how == "healthy":
                time.sleep(1.5 * HEALTHY)  # the first step, which compiles
            if number == HANGS_AT and how == "waits":
                asks_a_server(healer, limit)
            if number == HANGS_AT and (world == 1 or rank == 1):
                hang(how, folder)
            loss = model(torch.ones(1, 2)).square().mean()
            healer.observe(loss)
            loss.backward()
            for p in model.parameters():
                if world > 1:
                    dist.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            if number == HANGS_AT and how == "healthy":
                time.sleep(1.5 * HEALTHY)  # an evaluation, or a checkpoint


def main(root: Path) -> None:
    """Runs all at once, each in a folder of `root`; prints how -> exit status of each rank."""
    pids: dict[int, tuple[str, int]] = {}
    for how, world in RUNS.items():
        folder = root / how
        folder.mkdir()
        for rank in range(world):
            pid = forked(partial(train, how, folder, rank), Path(f"{folder}.{rank}.log"))
            pids[pid] = how, rank
    statuses = {how: [0] * world for how, world in RUNS.items()}
    while pids:
        if [*pids.values()] == [("stopped", 1)]:
            os.kill(next(iter(pids)), signal.SIGKILL)  # as a launcher does it
        pid, status = os.waitpid(-1, 0)
        how, rank = pids.pop(pid)
        statuses[how][rank] = os.waitstatus_to_exitcode(status)
    print(json.dumps(statuses), flush=True)


class Runs:
    def __init__(self, root: Path) -> None:
        self.root = root
        done = forked_programs.run("-m", "tests.runtime.test_hang_guard", root, timeout=BOUND_S)
        assert done.returncode == 0, done.stderr
        self.ended: dict[str, list[int]] = json.loads(done.stdout)

    def faults(self, how: str) -> list[dict[str, Any]]:
        return events(self.root / how, "fault")

    def stacks(self, how: str) -> dict[int, str]:
        """Rank -> its stacks, in the postmortem; those in the event are the same."""
        (found,) = postmortems(self.root / how)
        fault = self.faults(how)[-1]
        assert found["cause"] == fault["cause"] == ["HANG"]
        assert (fault["answer"], found["ending"]) == ("stop", "stopped")
        assert fault["stacks"] == found["stacks"]
        return {rank: each["stacks"] for each in found["stacks"] for rank in each["ranks"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("hangs"))


def test_one_process_is_ended_with_its_stack(runs):
    assert runs.ended["python"] == [EXIT_STATUS]
    (stacks,) = runs.stacks("python").values()
    assert "in hang" in stacks
    (found,) = postmortems(runs.root / "python")
    good = [each["step"] for each in events(runs.root / "python", "good")]
    assert found["last_good"] == max(good)


def test_all_ranks_are_ended_with_the_stacks_of_each(runs):
    assert runs.ended["sleeps"] == [EXIT_STATUS] * 2
    first, second = ((runs.root / f"sleeps.{rank}.log").read_text() for rank in (0, 1))
    assert "in hang" in second
    assert runs.stacks("sleeps")[0] in first
    assert "in all_reduce" in first
    assert "in hang" not in first


def test_a_stopped_rank_is_left_to_the_launcher(runs):
    first, stopped, third = runs.ended["stopped"]
    assert (first, stopped) == (EXIT_STATUS, -signal.SIGKILL)
    assert third in (EXIT_STATUS, 1), "the connection to rank 0 breaks"


@pytest.mark.parametrize(("how", "answer"), [("slow", None), ("preset", "alert")])
def test_what_does_not_end_a_run(how, answer, runs):
    """A policy that observes, and the presets."""
    assert runs.ended[how] == [0]
    fault = runs.faults(how)[0]
    assert fault.get("answer") == answer
    assert fault.get("observed", False) == (how == "slow")
    assert "in hang" in fault["stacks"][0]["stacks"]
    assert [each["ending"] for each in postmortems(runs.root / how)] == ["completed"]
    assert_on_the_page(Cause.HANG, (runs.root / f"{how}.0.log").read_text(), runs.root / how)
    history = read(runs.root / how / "healcore.events.jsonl")
    assert history.problems == []
    assert [each for event in history.events for each in problems(event)] == []


def test_a_long_first_step_and_a_long_evaluation_are_no_hang(runs):
    assert runs.ended["healthy"] == [0]
    assert runs.faults("healthy") == []


def test_a_wait_that_a_server_asks_for_is_no_hang(runs):
    assert runs.ended["waits"] == [0]
    (fault,) = runs.faults("waits")
    assert (fault["cause"], fault["wait_s"]) == (["NETWORK"], 4 * HEALTHY)


LEFT = """
from healcore import Healer
from tests.healer.training_loops import SKIPS, loop_of
loop = loop_of("torch")
with Healer(SKIPS, state=loop.state) as healer:
    iterator = healer.batches(range(9))
    for number in iterator:
        loop.step(healer, number)
        if number == 4:
            break
"""


def test_an_iterator_that_is_left_and_kept_ends_with_the_interpreter():
    """The guard of its wait would raise while the interpreter takes down its modules."""
    done = forked_programs.run("-c", LEFT)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
