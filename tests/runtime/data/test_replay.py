"""A training with dropout and shuffling is rolled back and replayed bit by bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from healcore.runtime.data import BatchId, Cursor
from tests.runtime.data.loaders import generator, plain, stateful


class Run:
    """Dropout, momentum, a shuffled loader: everything that a step depends on."""

    def __init__(self, loader) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.cursor = Cursor(loader, epochs=3)

    def save(self):
        # The position first: it may begin a pass, and that draws random numbers.
        position = self.cursor.position()
        parts = (self.model.state_dict(), self.optimizer.state_dict(), torch.get_rng_state())
        return position, copy.deepcopy(parts)

    def restore(self, saved) -> None:
        position, (model, optimizer, random) = copy.deepcopy(saved)
        assert self.cursor.rewind(position), self.cursor.why_not
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random)

    def train(self, steps: int) -> list[tuple[BatchId, bytes]]:
        curve = []
        for _ in range(steps):
            batch, which = self.cursor.next()
            loss = self.model(batch.float()[:, None] / 100).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            curve.append((which, loss.detach().numpy().tobytes()))
        return curve


LOADERS = {
    "own seed": lambda: stateful(shuffle=True),
    "generator": generator,
    "worker": lambda: stateful(shuffle=True, num_workers=1, persistent_workers=True),
    "plain": lambda: plain(shuffle=True),
    "plain worker": lambda: plain(shuffle=True, num_workers=1, persistent_workers=True),
}


@pytest.mark.parametrize("name", LOADERS)
def test_bit_by_bit(name):
    """After a rewind, and in a later process."""
    pytest.importorskip("torchdata")
    run = Run(LOADERS[name]())
    start = run.save()
    curve = run.train(3)
    early = run.save()  # in epoch 0
    curve += run.train(6)
    late = run.save()  # in epoch 2
    curve += run.train(3)
    for saved, done in ((late, 9), (early, 3), (start, 0)):
        run.restore(saved)
        assert run.train(12 - done) == curve[done:]
    if name != "worker":  # torchdata draws the seeds of workers again
        later = Run(LOADERS[name]())
        later.restore(early)
        assert later.train(9) == curve[3:]
