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

from benchmarks.healbench.problem import Problem, Task, Update

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

    def relative_cost(self, policy: np.ndarray, gamma: float, horizon: int = 500) -> float:
        """Exact expected cost of an episode, divided by that of the best policy: 1 is perfect.

        Args:
            policy: (states, actions), probabilities.
            gamma: discount of a step.
            horizon: steps after which an episode ends.
        """
        value = np.zeros(self.states)
        for _ in range(horizon):
            value = (policy * (self.reward + gamma * self.transition @ value)).sum(1)
        best = self.best(gamma, horizon).max(1)
        return float(value[self.starts].mean() / best[self.starts].mean())


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


class RunningMean:
    """An exponential mean that starts with the first value.

    Args:
        rate: weight of a new value.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.mean = np.zeros(0)

    def state_dict(self) -> dict[str, Any]:
        """The mean; empty before the first value."""
        return {"mean": self.mean.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a `state_dict`."""
        self.mean = np.array(state["mean"])

    def __call__(self, value: np.ndarray) -> np.ndarray:
        """The mean, with `value` in it."""
        self.mean = self.mean + self.rate * (value - self.mean) if self.mean.size else value
        return self.mean


def _mlp(
    inputs: int, outputs: int, nonlinearity: type[nn.Module] = nn.ReLU, width: int = 64
) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, width),
        nonlinearity(),
        nn.Linear(width, width),
        nonlinearity(),
        nn.Linear(width, outputs),
    )


def _decay(optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    """Linear to zero."""
    return LambdaLR(optimizer, lambda i: max(0.0, 1.0 - i / updates))


def _probabilities(policy: nn.Module, grid: Grid) -> np.ndarray:
    """float64 (states, actions)."""
    with torch.no_grad():
        return policy(grid.features).double().softmax(1).numpy()


def _dqn(seed: int) -> Problem:
    torch.manual_seed(seed)
    steps, gamma = 1200, 0.9
    grid = Grid(seed, move=0.0, mud=1.0, prize=10.0)
    network = _mlp(grid.features.shape[1], _ACTIONS, nn.Tanh)
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


def _reinforce(seed: int) -> Problem:
    torch.manual_seed(seed)
    steps, horizon, gamma = 600, 24, 0.97
    grid = Grid(seed, size=5, mud=3.0)
    policy = _mlp(grid.features.shape[1], _ACTIONS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-3)
    walkers, baseline = Walkers(grid, seed, count=64), RunningMean(0.05)

    def step(_: int, update: Update) -> None:
        walkers.restart()
        chances = _probabilities(policy, grid)
        rows = [walkers.act(chances) for _ in range(horizon)]
        state, action, reward, _after = (np.stack(column) for column in zip(*rows, strict=True))
        later = np.zeros_like(reward)
        total = np.zeros(reward.shape[1])
        for i in reversed(range(horizon)):
            later[i] = total = reward[i] + gamma * total
        walking = state != grid.goal
        gain = torch.from_numpy((later - baseline(later.mean(1))[:, None])[walking]).float()
        logs = policy(grid.features).log_softmax(1)[state[walking], action[walking]]
        update(-(logs * gain).mean())

    return Problem(
        modules={"policy": policy},
        optimizers={"main": optimizer},
        schedulers={"main": _decay(optimizer, steps)},
        batches=range(steps),
        step=step,
        evaluate=lambda: grid.relative_cost(_probabilities(policy, grid), gamma, horizon),
        state={"walkers": walkers, "baseline": baseline},
    )


def _sparse_reward(seed: int) -> Problem:
    """A lock with seven binary digits; a batch of twelve trials rarely holds the code."""
    torch.manual_seed(seed)
    steps, digits, trials, reward = 1200, 7, 12, 20.0
    generator = torch.Generator().manual_seed(seed)
    code = torch.randint(2, (digits,), generator=generator)
    draws = torch.rand(steps, trials, digits, generator=generator)
    policy = _mlp(digits, 2, width=32)
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


def _policy_gradient_rising(seed: int) -> Problem:
    torch.manual_seed(seed)
    steps, inputs, actions, spread = 800, 6, 2, 0.5
    generator = torch.Generator().manual_seed(seed)
    directions = F.normalize(torch.randn(inputs, actions, generator=generator), dim=0)
    contexts = torch.randn(steps, 256, inputs, generator=generator)
    noise = torch.randn(steps, 256, actions, generator=generator)
    held_out = torch.randn(8192, inputs, generator=generator)
    policy = _mlp(inputs, actions, nn.Tanh)
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


def _ppo(seed: int) -> Problem:
    torch.manual_seed(seed)
    iterations, length, epochs, parts, gamma, trace = 60, 32, 4, 4, 0.97, 0.95
    grid = Grid(seed, move=0.2, mud=0.6)
    policy = _mlp(grid.features.shape[1], _ACTIONS)
    critic = _mlp(grid.features.shape[1], 1)
    both = nn.ModuleDict({"policy": policy, "critic": critic})
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-3, eps=1e-5)
    walkers = Walkers(grid, seed, count=16)

    def rollout() -> tuple[Tensor, ...]:
        """State, action, its log-probability, advantage, return; each (length x walkers,)."""
        chances = _probabilities(policy, grid)
        with torch.no_grad():
            value = critic(grid.features)[:, 0].double().numpy()
        value[grid.goal] = 0.0
        rows = []
        for _ in range(length):
            before, action, reward, after = walkers.act(chances)
            ends = (after == grid.goal) | walkers.lost(0.1)
            walkers.restart(ends)
            rows.append((before, action, reward, after, ends))
        state, action, reward, after, ends = (np.stack(x) for x in zip(*rows, strict=True))
        surprise = reward + gamma * value[after] - value[state]
        gain = np.zeros_like(surprise)
        total = np.zeros(surprise.shape[1])
        for i in reversed(range(length)):
            gain[i] = total = surprise[i] + gamma * trace * total * ~ends[i]
        numbers = np.log(chances[state, action]), gain, gain + value[state]
        return (
            torch.from_numpy(state.ravel()),
            torch.from_numpy(action.ravel()),
            *(torch.from_numpy(each.ravel()).float() for each in numbers),
        )

    def step(_: int, update: Update) -> None:
        data = rollout()
        for _epoch in range(epochs):
            order = torch.from_numpy(walkers.rng.permutation(len(data[0])))
            for rows in order.chunk(parts):
                state, action, old, gain, returns = (column[rows] for column in data)
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                logs = policy(grid.features[state]).log_softmax(1)
                ratio = (logs.gather(1, action[:, None])[:, 0] - old).exp()
                bounded = torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                error = F.mse_loss(critic(grid.features[state])[:, 0], returns)
                entropy = -(logs.exp() * logs).sum(1).mean()
                update(-bounded + 0.5 * error - 0.01 * entropy)

    return Problem(
        modules={"both": both},
        optimizers={"main": optimizer},
        schedulers={"main": _decay(optimizer, iterations * epochs * parts)},
        batches=range(iterations),
        step=step,
        evaluate=lambda: grid.relative_cost(_probabilities(policy, grid), gamma),
        state={"walkers": walkers},
    )


TASKS: tuple[Task, ...] = (
    Task(
        name="dqn",
        kind="healthy",
        metric="1 + error of Q",
        build=_dqn,
        about="DQN with replay buffer and target network in a 6 x 6 grid with slips: the loss "
        "jumps at every copy of the target. The error is the root mean square against the exact "
        "values of all states and actions; the prize is 10.",
        quick=True,
    ),
    Task(
        name="reinforce",
        kind="healthy",
        metric="cost / best cost",
        build=_reinforce,
        about="REINFORCE with a running mean as baseline in a 5 x 5 grid with slips: the loss "
        "falls through zero and comes back to it from below. The cost is the exact expectation.",
        quick=True,
    ),
    Task(
        name="sparse_reward",
        kind="healthy",
        metric="1 - chance of success",
        build=_sparse_reward,
        about="REINFORCE on a combination lock: dozens of batches without a reward, whose gradient "
        "is nearly 0, then one with it.",
    ),
    Task(
        name="policy_gradient_rising",
        kind="healthy",
        metric="missed reward",
        build=_policy_gradient_rising,
        about="Policy gradient without a baseline, Gaussian policy of fixed width, contextual "
        "bandit with positive rewards: the better the policy, the higher the loss. The reward is "
        "the exact expectation on held-out contexts.",
        quick=True,
    ),
    Task(
        name="ppo",
        kind="healthy",
        metric="cost / best cost",
        build=_ppo,
        about="PPO with a learned value in a 6 x 6 grid with slips, 16 updates for each rollout, "
        "advantages by GAE. The cost is the exact expectation.",
    ),
)
