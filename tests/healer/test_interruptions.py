"""A healthy run that is interrupted in any way ends bit for bit as the run that is not interrupted.

A run that is interrupted within a trouble may decide some steps later, and ends as well.

This file is a program too: python -m tests.healer.test_interruptions PROGRAM ROOT KIND:STEP ...
Prints one line of JSON for each interruption, with what it has changed.
"""

import importlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from healcore import Checkpoints, Healer, Logging
from healcore import policy as policies
from healcore.events import read
from tests import forked_programs
from tests.healer.killed_runs import NAME, die, digest, forked

BATCHES = 130
FAULT = range(74, 124)
"""Batches with a learning rate that is 100 times too high. It damages the weights."""
POLICY = policies.load("default", rollback={"probation": 10})
KINDS = ("kill", "signal", "exit", "exception", "save", "break")
MAX_RATIO = {"rate": 1.02, "weights": 1.5}
"""Program -> loss of a run that is interrupted in a trouble, by that of a run that is not.

The noise on the weights cannot be repaired. Decided later, the run draws other noise."""


class Power(Exception):
    """The exception that interrupts a program."""


def data() -> list[Any]:
    make = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for _ in range(BATCHES):
        inputs = torch.randn(32, 4, generator=make)
        noise = torch.randn(32, 1, generator=make)
        found.append((inputs, inputs.sum(1, keepdim=True).tanh() + 0.1 * noise))
    return found


def interrupt(kind: str, healer: Healer[Any]) -> None:
    """Interrupts the program after a step, in the body of its loop."""
    if kind == "save":
        healer.save()
    elif kind == "signal":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "exit":
        sys.exit(3)
    elif kind == "exception":
        raise Power
    elif kind == "kill":
        die()


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(store: Path, kind: str, step: int, *, fault: str = "") -> torch.nn.Module:
    """Trains, and is interrupted after `step` steps of this process; never with -1.

    Args:
        store: the directory for checkpoints.
        kind: how it is interrupted, see `interrupt`.
        step: number of steps that this process has taken by then, repeated steps included.
        fault: "rate": the learning rate is too high; "weights": the program adds noise to the
            weights each time that it trains on these batches; or empty.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    passed = 0
    with Healer(
        POLICY,
        state={"model": model, "optimizer": optimizer},
        loss_fn=partial(loss_of, model),
        store=store,
        checkpoints=Checkpoints(every=10),
        logging=Logging(console=False),
    ) as healer:
        for batch in healer.batches(data()):
            if kind == "save" and step > 0 and passed == step + 3:
                die()
            is_faulty = healer.batch_index in FAULT
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * (100 if is_faulty and fault == "rate" else 1)
            if is_faulty and fault == "weights":
                for weights in model.parameters():
                    weights.data.add_(torch.randn_like(weights), alpha=0.3)
            healer.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            passed += 1
            if passed == step:
                interrupt(kind, healer)
                if kind == "break":
                    break
    return model


class Validation(Dataset[torch.Tensor]):
    """Batches to evaluate on, which draw random numbers. A signal may come while one is read."""

    signal_at_read = False

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.signal_at_read and index == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.randn(4)


def train_and_evaluate(store: Path, kind: str, step: int) -> torch.nn.Module:
    """Trains with dropout, evaluates each 5 steps, and is interrupted in the evaluation."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    validation = Validation()
    evaluated = DataLoader(validation)
    passed = 0
    with Healer(
        POLICY,
        state={"model": model, "optimizer": optimizer},
        store=store,
        checkpoints=Checkpoints(every=10),
        logging=Logging(console=False),
    ) as healer:
        for inputs, targets in healer.batches(data()[:40]):
            loss = (model(inputs) - targets).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            passed += 1
            if passed % 5:
                continue
            validation.signal_at_read = kind == "signal at read" and passed == step
            for number, inputs in enumerate(healer.batches(evaluated, name="evaluation")):
                with torch.no_grad():
                    model(inputs)
                if passed == step and number == 1:
                    interrupt(kind, healer)
    return model


PROGRAMS = {
    "healthy": train,
    "evaluate": train_and_evaluate,
    "rate": partial(train, fault="rate"),
    "weights": partial(train, fault="weights"),
}


def start(program: str, root: Path, kind: str, step: int) -> None:
    model = PROGRAMS[program](root / "store", kind, step)
    bits = digest(*[each.detach().numpy() for each in model.parameters()])
    loss = 0.0
    if program != "evaluate":
        with torch.no_grad():
            loss = sum(float(loss_of(model, batch)) for batch in data())
    rollbacks = sum(each["kind"] == "rollback" for each in read(root / "store" / NAME).events)
    end = {"bits": bits, "loss": loss, "rollbacks": rollbacks}
    (root / "end").write_text(json.dumps(end))


def run_to_end(program: str, root: Path, kind: str, step: int) -> None:
    """A run that is interrupted once, and started again; with step -1 it is not interrupted."""
    root.mkdir(parents=True)
    for at in dict.fromkeys((step, -1)):
        child = forked(partial(start, program, root, kind, at), root / f"errors {at}")
        _, status = os.waitpid(child, 0)
        assert at == step != -1 or status == 0, (root / f"errors {at}").read_text()


def end_of(root: Path) -> dict[str, Any]:
    return json.loads((root / "end").read_text())


def main(program: str, root: Path, interruptions: list[str]) -> None:
    for name in ("healcore.torch.driver", "healcore.torch.store", "torch._dynamo"):
        importlib.import_module(name)  # otherwise every start would do it
    run_to_end(program, root / "clean", "", -1)
    clean = end_of(root / "clean")
    is_faulty = program in ("rate", "weights")
    assert bool(clean["rollbacks"]) == is_faulty
    for each in interruptions:
        kind, step = each.split(":")
        run_to_end(program, root / each, kind, int(step))
        end = end_of(root / each)
        found: dict[str, Any] = {}
        if is_faulty:
            ratio = end["loss"] / clean["loss"]
            if not (end["rollbacks"] and ratio <= MAX_RATIO[program]):
                found = {"rollbacks": end["rollbacks"], "ratio": ratio}
        elif end != clean:
            found = {"end": end, "clean": clean}
        print(json.dumps({"interruption": each, **found}), flush=True)


def differences(program: str, root: Path, interruptions: list[str]) -> list[Any]:
    """The lines of the program about runs that end differently."""
    command = "-m", "tests.healer.test_interruptions", program, root, *interruptions
    done = forked_programs.run(*command)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(interruptions)
    return [each for each in found if len(each) > 1]


FEW = {
    "healthy": [f"{kind}:97" for kind in KINDS],
    "evaluate": ["exception:15", "signal at read:15"],
    "rate": ["signal:97", "exit:80", "save:90"],
}
"""Program -> interruptions."""


@pytest.mark.parametrize("program", FEW)
def test_an_interrupted_run_ends_as_well_as_the_run_that_is_not_interrupted(program, tmp_path):
    assert differences(program, tmp_path, FEW[program]) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("program", "steps"),
    [
        ("healthy", [1, 2, 9, 10, 11, 99, 100, 101, 128, 129]),
        ("rate", [69, 75, 76, 80, 81, 89, 90, 95, 99, 104, 105, 106, 107, 120]),
        # The program damages the weights at each repeat, so all tries fail, and are undone.
        # A kill at 176 comes after they are undone, and before the next save.
        ("weights", [95, 96, 97, 112, 121, 123, 140, 147, 150, 158, 168, 170, 172, 176, 185]),
    ],
)
def test_a_run_interrupted_at_any_step_ends_as_well(program, steps, kind, tmp_path):
    assert differences(program, tmp_path, [f"{kind}:{step}" for step in steps]) == []


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
