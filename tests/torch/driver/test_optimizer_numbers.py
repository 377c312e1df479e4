"""A number of the optimizer that damages the run: its last healthy value is tried."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from healcore import Healer
from healcore.events.models import validate
from healcore.events.schema import sentence
from tests.healer.run_directory import new_process
from tests.torch.driver.compared_run import CHANGE, Run, events, left_alone

DECAY = "optimizer.param_groups[0].weight_decay"


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
    assert backs[-1]["why"] in capsys.readouterr().err
    assert run.in_force == dict.fromkeys(range(steps), 0.01), "and no batch is skipped"
    assert 10.0 in run.seen, "the program reads its own"
    assert run.unseen_loss() <= 1.1 * undamaged(tmp_path / "undamaged", steps)


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
