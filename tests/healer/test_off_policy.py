"""Off-policy reinforcement learning: a warm-up, a replay buffer, an environment without a state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from healcore import Checkpoints, Healer
from healcore.errors import IncompleteRun
from healcore.torch import AttachError
from tests.healer.run_directory import new_process

ROWS = 40


class Walk:
    """A gym-like environment: a walk on a line, which ends at either end."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.at = 0.0
        return np.array([self.at], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.at += (2 * action - 1) + self.random.normal()
        ended = abs(self.at) > 5
        return np.array([self.at], np.float32), float(self.at > 5), ended, False, {}


class SavedWalk(Walk):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "random": dict(self.random.bit_generator.state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.random.bit_generator.state = state["at"], state["random"]


class QLearner(nn.Module):
    """A Q-learner with a replay buffer in a dictionary of arrays."""

    def __init__(self, env: Walk) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(1, 2)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-2)
        self.replay: dict[str, Any] = {
            "seen": np.zeros((ROWS, 2), np.float32),
            "reward": torch.zeros(ROWS),
            "action": np.zeros(ROWS, np.int64),
            "added": 0,
        }
        self.arrays = self.replay["seen"], self.replay["reward"]
        self.env = env
        self.at, _ = env.reset()

    def state(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.net, "optimizer": self.optimizer}
        if isinstance(self.env, SavedWalk):
            parts["env"] = self.env
        return {**parts, "replay": self.replay}

    def act(self) -> None:
        row = self.replay["added"] % ROWS
        action = int(torch.randint(2, ()))
        new, reward, ended, *_ = self.env.step(action)
        self.replay["seen"][row] = self.at[0], new[0]
        self.replay["reward"][row], self.replay["action"][row] = reward, action
        self.replay["added"] += 1
        self.at = self.env.reset()[0] if ended else new

    def train_step(self, healer: Any) -> None:
        rows = torch.randint(min(self.replay["added"], ROWS), (8,))
        seen = torch.from_numpy(self.replay["seen"])[rows]
        with torch.no_grad():
            target = self.replay["reward"][rows] + 0.9 * self.net(seen[:, 1:]).max(1).values
        chosen = torch.from_numpy(self.replay["action"])[rows]
        loss = (self.net(seen[:, :1])[range(8), chosen] - target).square().mean()
        healer.observe(loss)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def test_a_warm_up_may_be_as_long_as_the_training():
    """A run that has trained may not wait so long."""

    def numbers(total: int, first: int, *, then: int = 10) -> list[int]:
        """The numbers of a loop that trains from its iteration `first` on, `then` steps."""
        run = QLearner(Walk())
        seen: list[int] = []
        run.act()
        with Healer(state=run.state()) as healer:
            for iteration, step in enumerate(healer.steps(total)):
                if iteration >= first and step < then:
                    run.train_step(healer)
                elif step == 10:
                    break
                seen.append(step)
        return seen

    assert numbers(1600, 1500) == [0] * 1501 + [*range(1, 10)]
    with pytest.raises(IncompleteRun, match=r"not taken in 1000 iterations.*before the loop"):
        numbers(20, 1500)
    with pytest.raises(IncompleteRun, match="step 4 was not taken in 1000 iterations"):
        numbers(2000, 20, then=4)


def test_a_loop_that_trains_unseen_is_told():
    run = QLearner(Walk())
    other = torch.optim.SGD(run.net.parameters(), 0.1)

    def train() -> None:
        with Healer(state=run.state()) as healer:
            for _ in healer.steps(10):
                run.net(torch.randn(1, 1)).mean().backward()
                other.step()
                other.zero_grad()

    with pytest.raises(IncompleteRun, match=r"not taken in 1000 iterations.*needs the optimizer"):
        train()


def test_an_environment_that_cannot_be_saved_is_refused():
    with pytest.raises(AttachError, match=r'state\["env"\] is of type Walk'):
        Healer(state={**QLearner(Walk()).state(), "env": Walk()}).__enter__()


def trained(folder: Path | None = None, *, ends: int = -1, damaged: int = -1) -> QLearner:
    """A run of 60 steps, two rows for each; `ends` and `damaged` are steps."""
    new_process()
    run = QLearner(SavedWalk())
    faults = {damaged}
    options: dict[str, Any] = {
        "checkpoints": Checkpoints(every=7),
        "rollback": {"probation": 2, "confirm": False},
        "respond": [{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
    }
    with Healer(state=run.state(), store=folder, **options) as healer:
        for step in healer.steps(60):
            if step == ends:
                raise ZeroDivisionError
            if step in faults:
                faults.clear()
                with torch.no_grad():
                    run.net.weight.fill_(torch.nan)
            for _ in range(2):
                run.at = np.array([run.env.at], np.float32)  # of a rollback or a restart
                run.act()
            run.train_step(healer)
    assert healer.rollbacks == (damaged >= 0)
    return run


def bits(run: QLearner) -> list[Any]:
    arrays = [run.net.weight.detach().numpy(), *map(np.asarray, run.replay.values())]
    return [*(each.tobytes() for each in arrays), run.env.at]


def test_the_buffer_has_the_bits_of_an_undisturbed_run(tmp_path):
    """After a rollback and after a restart; the arrays are written in place."""
    plain = bits(trained())
    for damaged in (10, 45):
        run = trained(damaged=damaged)
        assert bits(run) == plain
        assert run.replay["seen"] is run.arrays[0]
        assert run.replay["reward"] is run.arrays[1]
    with pytest.raises(ZeroDivisionError):
        trained(tmp_path, ends=37)
    assert bits(trained(tmp_path)) == plain
