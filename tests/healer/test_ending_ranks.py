"""A rank ends alone: the job ends, and the next start repeats few steps.

The runs of three ranks are this file as a program: python -m tests.healer.test_ending_ranks ROOT.
In each case something happens to rank 1 in one start, and nothing in the next. Prints a JSON line
for each case.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.torch.store import gloo
from tests import forked_programs
from tests.healer.killed_runs import AFTER_ANOTHER, run_ranks
from tests.healer.training_loops import rules
from tests.open_run import run_of
from tests.torch.layouts import spread, whole

pytestmark = pytest.mark.slow  # several processes; the ranks of test_ranks.py are in `make test`

WORLD, STEPS, AT = 3, 12, 7
EVERY = 3
"""Steps between two checkpoints."""
BOUND = 100.0
"""Seconds that a rank which hangs would wait: longer than any start lasts."""
TIMEOUT = 6.0
"""The time-out of the process group in seconds, in the cases that it ends."""
GRACE = 3.0
"""Seconds between the launcher's SIGTERM and its SIGKILL."""

RAISES = ("FSDP2", "backward", "between", "update", "loader")
"""Where rank 1 raises an exception; with FSDP2 in the forward pass."""
TIMES_OUT = ("unequal", "breaks", "stopped", "waits for data")
"""What ends by the time-out of the process group."""
CASES = (*RAISES, "stop", "terminated", "killed", *TIMES_OUT)
"""What happens to rank 1 at step AT."""


def data(case: str, rank: int) -> Iterator[int]:
    """Numbers; on rank 1 it waits, ends or fails before one of them."""
    for number in range(STEPS):
        if number == AT and rank == 1:
            if case == "waits for data":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(BOUND)
            if case == "unequal":
                return
            if case == "loader":
                raise MemoryError("the loader has no memory")
        yield number


class Optimizer(torch.optim.SGD):
    """Raises within an update, in the case "update"."""

    raises = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if self.raises:
            self.param_groups[0]["params"][0].add_(1.0)
            raise ZeroDivisionError("update")
        return super().step(closure)


def train(case: str, root: Path, kind: str, rank: int) -> None:
    """A run from its start or its checkpoint; with `case` "" nothing happens to it."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    model, _ = spread(kind, net)
    optimizer = Optimizer(net.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(100 + rank)  # of the dropout
    state = {"model": net, "optimizer": optimizer}
    every = Checkpoints(every=EVERY)
    with Healer(rules(), state=state, store=root / "store", checkpoints=every) as healer:
        first = healer.step
        for number in healer.batches(data(case, rank)):
            here = case if number == AT and rank == 1 else ""
            if number == AT - 1:
                run_of(healer).store.wait()  # the newest checkpoint is on disk
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * number + rank))
            if here == "FSDP2":
                raise ZeroDivisionError("forward")
            if here in ("terminated", "killed", "stopped"):
                name = {"terminated": "SIGTERM", "killed": "SIGKILL", "stopped": "SIGSTOP"}[here]
                os.kill(os.getpid(), signal.Signals[name])
            if here == "stop":
                run_of(healer).stopping.stop("the user has seen enough")
            loss = model(x).square().mean()
            healer.observe(loss)
            loss.backward()
            if here == "backward":
                raise ZeroDivisionError("backward")
            if here == "breaks":
                break
            optimizer.raises = here == "update"
            optimizer.step()
            optimizer.zero_grad()
            if here == "between":
                raise ZeroDivisionError("between")
    weights = torch.cat([whole(p).flatten() for p in net.parameters()]).tolist()
    (root / f"end-{rank}.json").write_text(json.dumps({"first": first, "weights": weights}))
    dist.destroy_process_group()


def main(root: Path, cases: list[str]) -> None:
    undisturbed: dict[str, Any] = {}
    for kind in ("DDP", "FSDP2"):
        at = root / f"{kind} undisturbed"
        assert run_ranks(at, WORLD, partial(train, "", at, kind)).statuses == [0] * WORLD
        undisturbed[kind] = json.loads((at / "end-0.json").read_text())["weights"]
    for case in cases or CASES:
        kind = case if case == "FSDP2" else "DDP"
        at = root / case
        seconds = TIMEOUT if case in TIMES_OUT else BOUND
        gloo.TIMEOUT = timedelta(seconds=seconds)
        target = partial(train, case, at, kind)
        ended = run_ranks(at, WORLD, target, seconds=seconds, kills_after=GRACE)
        found: dict[str, Any] = {"statuses": ended.statuses}
        again = run_ranks(at, WORLD, partial(train, "", at, kind))
        assert again.statuses == [0] * WORLD, again
        ends = [json.loads((at / f"end-{rank}.json").read_text()) for rank in range(WORLD)]
        found["resumed"] = [each["first"] for each in ends]
        # DDP adds up in another order in the first step after a start.
        close = pytest.approx(undisturbed[kind], rel=1e-5, abs=1e-6)
        found["same"] = [each["weights"] == close for each in ends]
        print(json.dumps([case, found]), flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("ending")
    done = forked_programs.run("-m", "tests.healer.test_ending_ranks", root, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("case", CASES)
def test_the_job_ends_and_the_next_run_is_as_if_nothing_had_happened(case: str, outcomes: Any):
    found = outcomes[case]
    if case == "terminated":
        # The launcher's SIGTERM may reach the other ranks behind the end of their runs.
        assert found["statuses"][1] == 128 + signal.SIGTERM
        assert {*found["statuses"]} <= {128 + signal.SIGTERM, -signal.SIGTERM}
    elif case in ("killed", "stopped"):
        assert found["statuses"][1] == -signal.SIGKILL
    assert {found["statuses"][0], found["statuses"][2]} <= AFTER_ANOTHER
    assert found["same"] == [True] * WORLD
    (resumed,) = {*found["resumed"]}
    done = AT + (case == "between") + 2 * (case == "terminated")
    assert 0 <= done - resumed <= EVERY, "at most the distance of two checkpoints is lost"
    assert (resumed == done) == (case == "terminated"), "a signal is voted on, and saves"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
