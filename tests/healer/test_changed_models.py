"""Programs that change the structure of their model while they train.

They prune, widen a layer, unfreeze with `add_param_group`, add adapters, replace a head, or densify
points. No change ends a run that would go on without healcore.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from healcore import Checkpoints, Healer, RunStopped
from healcore.errors import StateMismatch
from healcore.torch import DCPStore
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import rules
from tests.open_run import run_of

EPOCHS, BATCHES = 4, 7
CHANGED_EPOCH = 2
CHANGE = CHANGED_EPOCH * BATCHES
"""The first step with the new structure."""
NAN = float("nan")
POLICY = rules(cut=False)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.ones(2, base.in_features) / 10)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


class Program:
    """A program that makes one kind of change at the begin of an epoch."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
        self.points = {"w": nn.Parameter(torch.randn(6, 4)), "v": nn.Parameter(torch.randn(6, 1))}
        first: Any = self.model.parameters()
        if kind == "unfreeze":
            self.model[0].requires_grad_(False)
            self.model[2].requires_grad_(False)
            first = self.model[3].parameters()
        if kind == "points":
            first = [{"params": [p], "name": name} for name, p in self.points.items()]
        self.optimizer = torch.optim.AdamW(first, lr=0.01)
        model = self.points if kind == "points" else self.model
        self.state = {"model": model, "optimizer": self.optimizer}
        self.bad: set[int] = set()
        """Numbers of the batches whose next loss is NaN, once."""

    def change(self) -> None:
        model, optimizer = self.model, self.optimizer
        layers: Any = model
        if self.kind == "prune":
            prune.l1_unstructured(layers[0], "weight", amount=0.3)
        if self.kind in ("wider", "smaller"):
            size = 12 if self.kind == "wider" else 5
            model[0], model[2] = nn.Linear(4, size), nn.Linear(size, 8)
            optimizer.param_groups[0]["params"] = [*model.parameters()]
            for p in {*optimizer.state} - {*model.parameters()}:
                del optimizer.state[p]
        if self.kind == "unfreeze":
            optimizer.add_param_group({"params": layers[2].requires_grad_().parameters()})
        if self.kind == "adapters":
            model[0] = Adapter(layers[0].requires_grad_(False))
            optimizer.add_param_group({"params": [layers[0].a, layers[0].b], "lr": 0.02})
        if self.kind == "head":
            old = {*layers[3].parameters()}
            model[3] = nn.Linear(8, 1)
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if p not in old]
            optimizer.add_param_group({"params": model[3].parameters()})
        for group in optimizer.param_groups if self.kind == "points" else ():
            [old] = group["params"]
            moments = optimizer.state.pop(old, {})
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2]]))
            for key in ("exp_avg", "exp_avg_sq") if moments else ():
                moments[key] = torch.cat([moments[key], torch.zeros_like(moments[key][:2])])
                optimizer.state[new] = moments
            group["params"][0] = self.points[group["name"]] = new

    def loss(self, number: int) -> Tensor:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        if self.kind == "points":
            out = torch.tanh(x @ self.points["w"].T) @ self.points["v"]
        else:
            out = self.model(x)
        loss = nn.functional.mse_loss(out, x.sum(1, keepdim=True).sin())
        if number in self.bad:
            self.bad.discard(number)
            loss = loss * NAN
        return loss

    def step(self, healer: Healer | None, number: int) -> None:
        loss = self.loss(number)
        if healer is not None:
            healer.observe(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[list[float]]:
        return [p.flatten().tolist() for g in self.optimizer.param_groups for p in g["params"]]

    def is_finite(self) -> bool:
        return all(math.isfinite(x) for each in self.weights() for x in each)


KINDS = ["prune", "wider", "smaller", "unfreeze", "adapters", "head", "points"]
all_kinds = pytest.mark.parametrize("kind", KINDS)
killed_late = pytest.mark.parametrize(
    "late",
    [
        pytest.param(2, id="same epoch", marks=pytest.mark.slow),
        pytest.param(BATCHES + 2, id="next epoch"),
    ],
)
"""Steps from the change to the kill."""


def plain_run(kind: str) -> Program:
    program = Program(kind)
    for epoch in range(EPOCHS):
        if epoch == CHANGED_EPOCH:
            program.change()
        for index in range(BATCHES):
            program.step(None, epoch * BATCHES + index)
    return program


def healed_run(
    program: Program,
    store: Path,
    *,
    before: Callable[[Healer], object] = lambda healer: None,
    policy: Any = POLICY,
    is_changed: bool = False,
) -> Healer:
    """A loop over `Healer.epochs`, which yields an epoch again after a rollback or a restart."""
    saves = Checkpoints(every=5)
    with Healer(policy, state=program.state, store=store, checkpoints=saves) as healer:
        for epoch in healer.epochs(EPOCHS):
            if epoch == CHANGED_EPOCH and not is_changed:
                program.change()
            numbers = [epoch * BATCHES + index for index in range(BATCHES)]
            for number in healer.batches(numbers, epoch=epoch):
                before(healer)
                program.step(healer, number)
    return healer


def once_at(step: int, action: Callable[[], object]) -> Callable[[Healer], None]:
    left = [action]

    def before(healer: Healer) -> None:
        if healer.step == step and left:
            left.pop()()

    return before


def poison(program: Program, group: int = 0) -> None:
    with torch.no_grad():
        program.optimizer.param_groups[group]["params"][0].view(-1)[0] = NAN


@all_kinds
def test_a_healthy_run_is_exact_and_has_a_checkpoint_right_after_the_change(kind, tmp_path):
    program = Program(kind)
    healer = healed_run(program, tmp_path)
    assert program.weights() == plain_run(kind).weights()
    assert healer.rollbacks == 0
    assert CHANGE + 1 in {each["step"] for each in events(tmp_path, "save")}


@all_kinds
def test_a_bad_batch_of_the_next_epoch_does_not_repeat_the_change(kind, tmp_path):
    """`add_param_group` would raise if the loop returned to the begin of the changed epoch."""
    program = Program(kind)
    program.bad = {CHANGE + BATCHES + 1}
    healer = healed_run(program, tmp_path)
    assert healer.rollbacks == 1
    assert program.is_finite()
    shapes = [len(each) for each in plain_run(kind).weights()]
    assert [len(each) for each in program.weights()] == shapes


@all_kinds
def test_a_bad_batch_right_after_the_change_leads_to_no_earlier_checkpoint(kind, tmp_path):
    """The weights are finite, and no checkpoint has the new structure yet."""
    program = Program(kind)
    program.bad = {CHANGE}
    healer = healed_run(program, tmp_path)
    assert program.is_finite()
    assert (healer.step, healer.rollbacks) == (EPOCHS * BATCHES, 0)
    why = [each["problem"] for each in events(tmp_path, "problem")]
    assert "no known-good checkpoint" in why[0]
    assert "the run continues" in why[0]


@all_kinds
def test_damage_soon_after_the_change_goes_back_to_the_first_checkpoint_after_it(kind, tmp_path):
    """This checkpoint is not known-good yet."""
    program = Program(kind)
    healed_run(program, tmp_path, before=once_at(CHANGE + 3, lambda: poison(program)))
    assert program.is_finite()
    assert [each["checkpoint"] for each in events(tmp_path, "rollback")] == [CHANGE + 1]


@all_kinds
def test_damaged_weights_after_the_change_are_restored(kind, tmp_path):
    program = Program(kind)
    at = CHANGE + 9  # in the next epoch
    healed_run(program, tmp_path, before=once_at(at, lambda: poison(program)), policy="default")
    assert program.is_finite() or not events(tmp_path, "rollback")


@all_kinds
def test_damage_before_the_first_checkpoint_after_the_change_stops_the_run(kind, tmp_path):
    program = Program(kind)
    with pytest.raises(RunStopped, match="no known-good checkpoint"):
        healed_run(program, tmp_path, before=once_at(CHANGE, lambda: poison(program)))


class Killed(Exception):
    pass


def kill() -> None:
    raise Killed


def killed_at(step: int, kind: str, store: Path) -> None:
    with pytest.raises(Killed):
        healed_run(Program(kind), store, before=once_at(step, kill))
    new_process()


@all_kinds
@killed_late
def test_a_restart_in_the_first_form_says_what_to_do(kind, late, tmp_path):
    killed_at(CHANGE + late, kind, tmp_path)
    with pytest.raises(StateMismatch, match="changed the structure of its model") as error:
        healed_run(Program(kind), tmp_path)
    assert f"at step {CHANGE} (epoch {CHANGED_EPOCH})" in str(error.value)
    assert "before `with Healer(...)`" in str(error.value)


@all_kinds
@killed_late
def test_a_restart_of_a_program_that_makes_the_change_is_exact(kind, late, tmp_path):
    """As the page shows: the newest checkpoint tells which changes are to be made before."""
    killed_at(CHANGE + late, kind, tmp_path)
    program = Program(kind)
    assert max(each.step for each in DCPStore(tmp_path).checkpoints()) > CHANGE
    program.change()
    healed_run(program, tmp_path, is_changed=True)
    assert program.weights() == plain_run(kind).weights()


class Changing:
    """Calls a change at a step of a loop with its own data."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = [CHANGE]

    def run(self, healer: Healer) -> Iterator[int]:
        for step in healer.steps(EPOCHS * BATCHES):
            if step == CHANGE:  # also if the number comes again
                self.program.change()
            yield step


@all_kinds
@pytest.mark.parametrize(
    "bad", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(5, marks=pytest.mark.slow)]
)
def test_a_loop_over_steps_does_not_come_to_the_change_again(kind, bad, tmp_path):
    program = Program(kind)
    program.bad = {CHANGE + bad}
    saves = Checkpoints(every=5)
    with Healer(POLICY, state=program.state, store=tmp_path, checkpoints=saves) as healer:
        for step in Changing(program).run(healer):
            program.step(healer, step)
    shapes = [len(each) for each in plain_run(kind).weights()]
    assert [len(each) for each in program.weights()] == shapes


@all_kinds
def test_damage_that_comes_back_never_ends_at_a_checkpoint_that_does_not_fit(kind, tmp_path):
    """The oldest one that fits is restored again, until the budget of rollbacks ends the run."""
    program = Program(kind)

    def spoilt_run() -> None:
        saves = Checkpoints(every=5)
        with Healer(POLICY, state=program.state, store=tmp_path, checkpoints=saves) as healer:
            for step in Changing(program).run(healer):
                if step == CHANGE + 9:  # also if the step comes again
                    poison(program)
                program.step(healer, step)

    with pytest.raises(RunStopped, match="budget of recoveries"):
        spoilt_run()
    assert [each["checkpoint"] for each in events(tmp_path, "rollback")] == [20, 15, 15]


def test_code_after_a_pass_may_change_the_model_too(tmp_path):
    """The pass is ended early by a rollback, and its code runs with the restored weights."""
    program = Program("wider")
    program.bad = {CHANGE + 1}
    saves = Checkpoints(every=5)
    with Healer(POLICY, state=program.state, store=tmp_path, checkpoints=saves) as healer:
        for epoch in healer.epochs(EPOCHS):
            numbers = [epoch * BATCHES + index for index in range(BATCHES)]
            for number in healer.batches(numbers, epoch=epoch):
                program.step(healer, number)
            if epoch == CHANGED_EPOCH:
                program.change()
    assert healer.rollbacks == 1
    assert program.is_finite()


def test_copies_of_weights_from_before_a_change_are_not_compared(tmp_path):
    """Also where the parameters have the same shapes and are the same objects."""
    program = Program("prune")
    anchors = []

    def look(healer: Healer) -> None:
        comparisons = run_of(healer).witness  # type: ignore[union-attr]
        anchors.append((healer.step, [each.step for each in comparisons.state.anchors]))

    saves = Checkpoints(every=5)
    state = program.state
    with Healer(
        "default",
        state=state,
        store=tmp_path,
        checkpoints=saves,
        loss_fn=lambda number: program.loss(int(number)),
    ) as healer:
        for epoch in healer.epochs(EPOCHS):
            if epoch == CHANGED_EPOCH:
                program.change()
            for number in healer.batches(range(BATCHES), epoch=epoch):
                look(healer)
                healer.loss(number).backward()
                program.optimizer.step()
                program.optimizer.zero_grad()
    seen = dict(anchors)
    assert min(seen[CHANGE]) < CHANGE
    assert seen[CHANGE + 1] == [CHANGE + 1]
