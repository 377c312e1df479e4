"""Reinforcement learning: losses that are no function of a batch, and that rise or cross zero.

The worlds are small enough to be solved exactly, so every metric is an exact expectation and not
an average over sampled episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.healbench.problem import Problem, Update, task
from benchmarks.healbench.tasks.models import mlp

_MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))
_ACTIONS = len(_MOVES)


class Grid:
    """A square world of cells with walls around it and mud in a fifth of the cells.

    An episode ends at the goal, in a corner. One move in ten goes in a random direction; a move
    against a wall stays.

    Args:
        seed: of the places of the mud.
        size: cells along an edge.
        move: cost of a step.
        mud: cost of a step that ends in mud.
        prize: reward of the step that ends at the goal.
    """

    slip = 0.1
    goal = 0

    def __init__(
        self, seed: int, size: int = 6, move: float = 1.0, mud: float = 5.0, prize: float = 0.0
    ) -> None:
        cells = size * size
        self.states = cells
        self.starts = np.arange(1, cells)
        self.entry = np.full(cells, -move)
        """float (states,): the reward of a step into a cell."""
        self.entry[np.random.default_rng(seed).permutation(self.starts)[: cells // 5]] = -mud
        self.entry[self.goal] = prize
        rows, columns = np.divmod(np.arange(cells), size)
        targets = [
            np.clip(rows + down, 0, size - 1) * size + np.clip(columns + right, 0, size - 1)
            for down, right in _MOVES
        ]
        self.target = np.stack(targets, axis=1)
        """int (states, actions): where a move leads that does not slip."""
        moves = np.eye(cells)[self.target]
        self.transition = (1 - self.slip) * moves + self.slip * moves.mean(1, keepdims=True)
        """float (states, actions, states)."""
        self.reward = self.transition @ self.entry
        """float (states, actions): the expected reward."""
        self.transition[self.goal] = 0.0
        self.reward[self.goal] = 0.0
        self.features = torch.cat(
            [F.one_hot(torch.from_numpy(each), size) for each in (rows, columns)], dim=1
        ).float()
        """(states, 2 x size): what a network sees of a cell."""

    def best(self, gamma: float, horizon: int = 500) -> np.ndarray:
        """Exact values (states, actions) of the best policy, by value iteration."""
        value = np.zeros_like(self.reward)
        for _ in range(horizon):
            value = self.reward + gamma * self.transition @ value.max(1)
        return value


class Walkers:
    """Agents in a grid and the random numbers of their run: everything that a replay needs.

    Args:
        grid: where they walk.
        seed: of starts, actions and slips.
        count: how many walk side by side.
    """

    def __init__(self, grid: Grid, seed: int, count: int) -> None:
        self.grid = grid
        self.rng = np.random.Generator(np.random.SFC64(seed))
        self.at = grid.starts[self.rng.integers(len(grid.starts), size=count)]

    def state_dict(self) -> dict[str, Any]:
        """Places and the generator's state."""
        return {"at": self.at.copy(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a `state_dict`."""
        self.at = np.array(state["at"])
        self.rng.bit_generator.state = state["rng"]

    def restart(self, which: np.ndarray | slice = slice(None)) -> None:
        """New starts; the same amount of random numbers whoever is meant."""
        fresh = self.grid.starts[self.rng.integers(len(self.grid.starts), size=len(self.at))]
        self.at[which] = fresh[which]

    def lost(self, chance: float) -> np.ndarray:
        """Which episodes are cut short, bool (count,)."""
        return self.rng.random(len(self.at)) < chance

    def act(self, policy: np.ndarray) -> tuple[np.ndarray, ...]:
        """One step of everybody.

        Args:
            policy: (states, actions), probabilities.

        Returns:
            State, action, reward, next state, each (count,). Whoever is at the goal stays.
        """
        draws = self.rng.random((3, len(self.at)))
        before = self.at.copy()
        chances = policy[before].cumsum(1)
        action = np.minimum((draws[0][:, None] > chances).sum(1), _ACTIONS - 1)
        slipped = draws[1] < self.grid.slip
        move = np.where(slipped, (draws[2] * _ACTIONS).astype(np.int64), action)
        home = before == self.grid.goal
        self.at = np.where(home, before, self.grid.target[before, move])
        reward = np.where(home, 0.0, self.grid.entry[self.at])
        return before, action, reward, self.at.copy()


class Replay:
    """A ring of transitions.

    Args:
        capacity: how many it keeps.
    """

    def __init__(self, capacity: int) -> None:
        self.rows = np.zeros((capacity, 4))
        self.added = 0

    def state_dict(self) -> dict[str, Any]:
        """The transitions and how many were ever added."""
        return {"rows": self.rows.copy(), "added": self.added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a `state_dict`."""
        self.rows = np.array(state["rows"])
        self.added = int(state["added"])

    def add(self, *columns: np.ndarray) -> None:
        """State, action, reward, next state, each (n,)."""
        places = (self.added + np.arange(len(columns[0]))) % len(self.rows)
        self.rows[places] = np.stack(columns, axis=1)
        self.added += len(places)

    def sample(self, rng: np.random.Generator, count: int) -> tuple[Tensor, ...]:
        """Columns of `count` random transitions."""
        rows = torch.from_numpy(
            self.rows[rng.integers(min(self.added, len(self.rows)), size=count)]
        )
        return rows[:, 0].long(), rows[:, 1].long(), rows[:, 2].float(), rows[:, 3].long()


def _decay(optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    """Linear to zero."""
    return LambdaLR(optimizer, lambda i: max(0.0, 1.0 - i / updates))


@task("rises by design", "1 + error of Q", quick=True)
def dqn(seed: int) -> Problem:
    """DQN in a 6 x 6 grid: the loss jumps at every copy of the target network."""
    torch.manual_seed(seed)
    steps, gamma = 1200, 0.9
    grid = Grid(seed, move=0.0, mud=1.0, prize=10.0)
    network = mlp(grid.features.shape[1], 64, 64, _ACTIONS, activation=nn.Tanh)
    target = deepcopy(network).requires_grad_(False)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    walkers, replay = Walkers(grid, seed, count=16), Replay(capacity=32768)

    def step(index: int, update: Update) -> None:
        explore = max(0.3, 1.0 - index / 500)
        with torch.no_grad():
            greedy = F.one_hot(network(grid.features).argmax(1), _ACTIONS).numpy()
        for _ in range(1 if replay.added else 16):
            before, action, reward, after = walkers.act((1 - explore) * greedy + explore / _ACTIONS)
            replay.add(before, action, reward, after)
            walkers.restart((after == grid.goal) | walkers.lost(0.03))
        if index % 50 == 0:
            target.load_state_dict(network.state_dict())
        state, action, reward, after = replay.sample(walkers.rng, 128)
        with torch.no_grad():
            future = target(grid.features[after]).max(1).values * (after != grid.goal)
        value = network(grid.features[state]).gather(1, action[:, None])[:, 0]
        update(F.mse_loss(value, reward + gamma * future))

    def evaluate() -> float:
        with torch.no_grad():
            value = network(grid.features).double().numpy()
        error = (value - grid.best(gamma))[grid.starts]
        return 1.0 + float(np.sqrt((error**2).mean()))

    return Problem(
        modules={"network": network, "target": target},
        optimizers={"main": optimizer},
        schedulers={"main": _decay(optimizer, steps)},
        batches=range(steps),
        step=step,
        evaluate=evaluate,
        state={"walkers": walkers, "replay": replay},
    )


@task("rises by design", "1 - chance of success")
def sparse_reward(seed: int) -> Problem:
    """REINFORCE on a lock: dozens of batches with hardly a gradient, then one with a reward."""
    # A lock with seven binary digits; a batch of twelve trials rarely holds the code.
    torch.manual_seed(seed)
    steps, digits, trials, reward = 1200, 7, 12, 20.0
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(2, (digits,), generator=generator)
    draws = torch.rand(steps, trials, digits, generator=generator)
    policy = mlp(digits, 32, 32, 2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=4e-3)
    each_digit = torch.eye(digits)

    def step(draw: Tensor, update: Update) -> None:
        logs = policy(each_digit).log_softmax(1)
        tried = (draw < logs.detach().exp()[:, 1]).long()
        gain = reward * (tried == code).all(1)
        chosen = logs[torch.arange(digits), tried].sum(1)
        entropy = -(logs.exp() * logs).sum(1).mean()
        update(-(gain * chosen).mean() - 0.02 * entropy)

    @torch.no_grad()
    def evaluate() -> float:
        logs = policy(each_digit).log_softmax(1)
        return float(1 - logs[torch.arange(digits), code].sum().exp())

    return Problem(
        modules={"policy": policy},
        optimizers={"main": optimizer},
        batches=list(draws),
        step=step,
        evaluate=evaluate,
    )


@task("rises by design", "missed reward", quick=True)
def policy_gradient_rising(seed: int) -> Problem:
    """Policy gradient without a baseline: the better the policy, the higher the loss."""
    torch.manual_seed(seed)
    steps, inputs, actions, spread = 800, 6, 2, 0.5
    generator = torch.Generator().manual_seed(seed)
    directions = F.normalize(torch.randn(inputs, actions, generator=generator), dim=0)
    contexts = torch.randn(steps, 256, inputs, generator=generator)
    noise = torch.randn(steps, 256, actions, generator=generator)
    held_out = torch.randn(8192, inputs, generator=generator)
    policy = mlp(inputs, 64, 64, actions, activation=nn.Tanh)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)

    def missed(action: Tensor, context: Tensor) -> Tensor:
        """Squared distance from the best action."""
        return (action - 2.5 * torch.sin(2 * context @ directions)).square().sum(1)

    def step(batch: tuple[Tensor, Tensor], update: Update) -> None:
        mean = policy(batch[0])
        action = mean.detach() + spread * batch[1]
        reward = 10 * torch.exp(-missed(action, batch[0]) / 2)
        logs = torch.distributions.Normal(mean, spread).log_prob(action).sum(1)
        update(-(logs * reward).mean())

    def evaluate() -> float:
        # The reward is a normal density but for a factor: its mean over the actions is another.
        wide = 1 + spread**2
        with torch.no_grad():
            expected = 10 / wide * torch.exp(-missed(policy(held_out), held_out) / (2 * wide))
        return 10 - float(expected.mean())

    return Problem(
        modules={"policy": policy},
        optimizers={"main": optimizer},
        schedulers={"main": _decay(optimizer, steps)},
        batches=list(zip(contexts, noise, strict=True)),
        step=step,
        evaluate=evaluate,
    )
