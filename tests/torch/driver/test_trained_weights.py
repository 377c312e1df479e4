"""Weights that are compared are those that the optimizers train, and nothing else of the state."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from healcore import Healer
from healcore.runtime.dominance import dominance
from healcore.torch.driver.driver import TorchDriver
from tests.healer.run_options import grouped
from tests.torch.driver.compared_run import CHANGE, Run, events


@pytest.fixture(autouse=True)
def free_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons take no time, so their distance does not depend on the load of the machine."""
    monkeypatch.setattr(dominance, "time", SimpleNamespace(monotonic=lambda: 5.0))


class Contrast(nn.Module):
    """Momentum contrast: a queue of keys from an average of the encoder."""

    queue: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.momentum = copy.deepcopy(self.encoder)
        self.register_buffer("queue", torch.randn(128, 8))

    def forward(self, views: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        first, second = views
        query = nn.functional.normalize(self.encoder(first), dim=1)
        with torch.no_grad():
            key = nn.functional.normalize(self.momentum(second), dim=1)
        same = (query * key).sum(1, keepdim=True)
        others = query @ nn.functional.normalize(self.queue, dim=1).T
        logits = torch.cat([same, others], 1) / 0.2
        return nn.functional.cross_entropy(logits, torch.zeros(len(first), dtype=torch.long))

    @torch.no_grad()
    def follow(self, second: torch.Tensor) -> None:
        for old, new in zip(self.momentum.parameters(), self.encoder.parameters(), strict=True):
            old.lerp_(new, 0.02)
        self.queue.copy_(torch.cat([self.momentum(second), self.queue])[: len(self.queue)])


def views(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(32, 8, generator=generator)
    return tuple(x + 0.3 * torch.randn(32, 8, generator=generator) for _ in range(2))  # type: ignore[return-value]


def train_contrast(folder: Path, *, compares: bool, steps: int = 500) -> tuple[Contrast, Healer]:
    torch.manual_seed(0)
    model = Contrast()
    optimizer = torch.optim.SGD(model.encoder.parameters(), lr=0.1, momentum=0.9)
    state = {"model": model, "optimizer": optimizer}
    options = {"loss_fn": model if compares else None, "save_every": 50}
    with Healer("default", state=state, **grouped(options, events=folder / "e.jsonl")) as healer:
        for batch in healer.batches([views(number) for number in range(steps)]):
            loss = model(batch)
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            model.follow(batch[1])
    return model, healer


def test_a_momentum_encoder_is_compared_as_it_is(tmp_path):
    """The run ends bit for bit as without comparisons."""
    plain, _ = train_contrast(tmp_path / "plain", compares=False)
    model, healer = train_contrast(tmp_path / "compared", compares=True)
    assert healer.rollbacks == 0
    assert not events(tmp_path / "compared", "assessment")
    for name, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    comparison: Any = healer.run.recovery.dominance
    trained = {id(p) for p in model.encoder.parameters()}
    assert comparison._prices, "weights were compared"
    assert all(each.weights.keys() == trained for each in comparison.anchors)


def test_an_average_stays_current_while_earlier_weights_are_evaluated():
    model = nn.Linear(2, 1)
    average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    driver = TorchDriver({"model": model, "average": average, "optimizer": optimizer})
    weights = driver.copy_weights()
    assert weights.keys() == {id(p) for p in model.parameters()}
    with torch.no_grad():
        for p in (*model.parameters(), *average.parameters()):
            p.fill_(3.0)
    seen = lambda batch: (model.bias + 100 * average.bias).sum()  # noqa: E731
    (loss,) = driver.losses_of(seen, [None], weights)
    assert loss == pytest.approx(weights[id(model.bias)].item() + 300.0)
    assert model.bias.item() == average.bias.item() == 3.0


def test_weights_that_an_optimizer_copies_are_replaced_in_the_module_too():
    """The optimizer trains copies in float32, which a step writes into the module."""
    module = nn.Linear(2, 1).bfloat16()
    masters = [p.detach().float() for p in module.parameters()]
    optimizer = torch.optim.SGD([p.requires_grad_() for p in masters], lr=0.1)
    driver = TorchDriver({"model": module, "masters": masters, "optimizer": optimizer})
    assert driver.copy_weights().keys() == {id(p) for p in (*masters, *module.parameters())}


def test_an_expected_change_drops_the_copies(tmp_path):
    """Weights that are replaced on purpose are worse at first; no earlier weights are restored."""
    run = Run()

    def at(healer: Healer) -> None:
        if healer.step == CHANGE:
            healer.expect_change()
            assert not healer.run.recovery.dominance.anchors
            with torch.no_grad():
                for p in run.model.parameters():
                    p.copy_(torch.randn(p.shape) / 3)

    healer: Any = run.train(tmp_path, at=at)
    assert healer.rollbacks == 0
    comparison = healer.run.recovery.dominance
    assert comparison.anchors
    assert all(each.step > CHANGE for each in comparison.anchors)
