"""A number of the optimizer that damages the run: its last healthy value is tried."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from healcore import Healer
from healcore.events.models import validate
from healcore.runtime.dominance import dominance
from healcore.runtime.healthy_range import HealthyRange
from healcore.runtime.postmortem.sentences import sentence
from healcore.torch.enforcer import Enforcer
from healcore.torch.optimizer_numbers import numbers
from tests.healer.run_directory import new_process
from tests.torch.driver.compared_run import CHANGE, Run, events, left_alone

DECAY = "optimizer.param_groups[0].weight_decay"


@pytest.fixture(autouse=True)
def free_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons take no time, so their distance does not depend on the load of the machine."""
    monkeypatch.setattr(dominance, "time", SimpleNamespace(monotonic=lambda: 5.0))


class Decayed(Run):
    """AdamW, with a weight decay by step number: it comes again when the steps are repeated."""

    def __init__(self, until: int, bad: float = 10.0, decay: float = 0.01) -> None:
        super().__init__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=decay)
        self.until, self.bad, self.decay = until, bad, decay
        self.step = 0
        self.seen: set[float] = set()
        """Values that the program has read between its steps."""
        self.in_force: dict[int, float] = {}
        """Step -> weight decay of its last update."""

    def now(self) -> float:
        return self.optimizer.param_groups[0]["weight_decay"]

    def at(self, healer: Healer) -> None:
        self.seen.add(self.now())
        if not self.in_force:
            self.optimizer.register_step_pre_hook(
                lambda *_: self.in_force.update({self.step: self.now()})
            )
        self.step = healer.step
        unusual = CHANGE <= healer.step < self.until
        self.optimizer.param_groups[0]["weight_decay"] = self.bad if unusual else self.decay


def undamaged(folder: Path, steps: int) -> float:
    run = Decayed(until=0)
    left_alone(folder, run.train(folder, at=run.at, steps=steps))
    return run.unseen_loss()


@pytest.mark.parametrize(
    ("until", "steps"), [(CHANGE + 40, 330), (10_000, 600)], ids=["40 steps", "to the end"]
)
def test_an_unusual_weight_decay_is_held_at_the_last_healthy_one(tmp_path, until, steps, capsys):
    """With 40 steps the data end before the run could recover."""
    run = Decayed(until)
    run.train(tmp_path, at=run.at, steps=steps)
    backs = events(tmp_path, "rollback")
    assert backs[-1]["why"] == f"{DECAY} 0.01 while the program sets other values"
    assert backs[-1]["why"] in sentence(validate(backs[-1])[0])
    assert f"{backs[-1]['why']}; data rewound" in capsys.readouterr().err.replace(
        ", data", "; data"
    )
    assert run.in_force == dict.fromkeys(range(steps), 0.01), "and no batch is skipped"
    assert 10.0 in run.seen, "the program reads its own"
    assert run.unseen_loss() <= 1.1 * undamaged(tmp_path / "undamaged", steps)


def test_a_schedule_of_the_weight_decay_is_in_force_in_the_end(tmp_path):
    """Damage at each pass: all that applies is tried, and undone."""
    run = Decayed(until=0)

    def at(healer: Healer) -> None:
        run.decay = 0.01 + healer.step / 10_000
        run.at(healer)
        if healer.step == CHANGE:
            with torch.no_grad():
                run.model[4].weight.mul_(50.0)  # type: ignore[operator]

    run.train(tmp_path, at=at, steps=600)
    assert events(tmp_path, "rollback")
    assert run.in_force == {step: 0.01 + step / 10_000 for step in range(600)}


def test_a_hold_that_has_not_helped_is_undone(tmp_path):
    run = Decayed(until=10_000)

    def at(healer: Healer) -> None:
        run.at(healer)
        if healer.step == CHANGE:
            with torch.no_grad():
                run.model[4].weight.mul_(50.0)  # type: ignore[operator]

    run.train(tmp_path, at=at, steps=600)
    backs = events(tmp_path, "rollback")
    tried = ["why" in back for back in backs]
    assert tried.count(True) == 1
    assert not tried[-1], "undone"
    assert {run.in_force[step] for step in range(CHANGE, 600)} == {10.0}


def test_a_hold_ends_with_the_unusual_value(tmp_path):
    """A later value is another one, which has not been tried."""
    run = Decayed(until=450)

    def at(healer: Healer) -> None:
        run.decay = 0.01 if healer.step < 500 else 0.05
        run.at(healer)

    run.train(tmp_path, at=at, steps=600)
    assert {run.in_force[step] for step in range(500)} == {0.01}
    assert {run.in_force[step] for step in range(500, 600)} == {0.05}


def test_a_hold_survives_a_kill(tmp_path):
    first = Decayed(until=10_000)

    def killed(healer: Healer) -> None:
        first.at(healer)
        if healer.step == 550 and healer.rollbacks == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        first.train(tmp_path, at=killed, steps=600, store=tmp_path)
    new_process()
    run = Decayed(until=10_000)
    run.train(tmp_path, at=run.at, steps=600, store=tmp_path)
    assert min(run.in_force) > 0, "resumed"
    assert {*run.in_force.values()} == {0.01}
    assert 10.0 in run.seen


def test_the_numbers_of_an_optimizer():
    """Without rates, tensors and switches. A tuple is replaced as a whole, for one step."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    group = optimizer.param_groups[0]
    found = numbers("o", optimizer)
    assert {name.rpartition(".")[2]: value for name, value in found.items()} == {
        "betas[0]": 0.9,
        "betas[1]": 0.999,
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    enforcer = Enforcer(optimizer, by_kernel=False, scales_lr=True)
    group["betas"] = betas = (0.5, 0.999)
    enforcer.hold_numbers("o", {name: HealthyRange.of(value) for name, value in found.items()})
    assert group["betas"] == (0.9, 0.999)
    enforcer.restore()
    assert group["betas"] is betas


@given(st.lists(st.floats(-10, 10), min_size=1), st.floats(-30, 30))
def test_a_healthy_range(values, value):
    found = None
    for each in values:
        found = HealthyRange.of(each, found)
    assert found is not None
    assert all(found.contains(each) and found.held(each) == each for each in values)
    assert found.contains(found.held(value))
    if not 2 * min(values) - max(values) <= value <= 2 * max(values) - min(values):
        assert math.isclose(found.held(value), values[-1]) or found.contains(value)


def test_an_int_stays_an_int():
    """`max_iter` of L-BFGS is an argument of `range`."""
    assert isinstance(HealthyRange.of(20.0).held(5), int)
    assert HealthyRange.of(0.01).held(10) == 0.01
