"""The parts' summed gradient and observed loss equal the whole batch's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from healcore.runtime.healer import Healer
from healcore.runtime.loop.termination import IncompleteRun

VOCABULARY, IGNORED = 11, -100


class Tagger(nn.Module):
    """A class for each token."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 5, dtype=dtype)
        self.out = nn.Linear(5, VOCABULARY, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embedding(ids)))


def tokens(seed: int, samples: int, length: int, ignored: float) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(VOCABULARY, (samples, length), generator=random)
    labels[torch.rand(samples, length, generator=random) < ignored] = IGNORED
    labels[0, 0] = 0  # at least one counts
    return {"ids": torch.randint(VOCABULARY, (samples, length), generator=random), "labels": labels}


def entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def per_sample(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A mean over samples of what is a sum over tokens."""
    each = F.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none")
    return each.sum(1).mean()


def gradients(model: nn.Module) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module", params=[torch.float64, torch.float32], ids=["float64", "float32"])
def run(request):
    torch.manual_seed(0)
    model = Tagger(request.param)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with contextlib.suppress(IncompleteRun), Healer(state=state) as healer:
        yield healer, model


BATCHES = st.builds(
    tokens,
    seed=st.integers(0, 99),
    samples=st.integers(1, 33),
    length=st.integers(1, 9),
    ignored=st.sampled_from([0.0, 0.5, 0.95]),
)


@settings(max_examples=60)
@given(batch=BATCHES, most=st.integers(1, 33))
@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (entropy, {"count": "labels"}),
        (entropy, {"count": lambda part: (part["labels"] != IGNORED).sum()}),
        (per_sample, {}),
    ],
    ids=["tokens by key", "tokens by function", "samples"],
)
def test_mean_losses(run, loss_fn, options, batch, most):
    healer, model = run
    loss = loss_fn(model, batch)
    loss.backward()
    expected = gradients(model)
    healer._loop.record.part_limit = most
    for part in healer.microbatches(batch, **options):
        with part:
            loss_of_part = loss_fn(model, part.batch)
            healer.observe(loss_of_part)
            (loss_of_part * part.weight).backward()
    assert relative(gradients(model), expected) < 1e-6
    observed = healer._loop.driver.healings["optimizer"].hooks.measurer.losses
    assert float(observed.mean()) == pytest.approx(loss.item(), rel=1e-6)
    observed.clear()


def test_a_part_without_a_token_that_counts_is_left_out(run):
    """Its mean is NaN, and 0 times that too."""
    healer, _ = run
    batch = tokens(0, 4, 3, 0.0)
    batch["labels"][2:] = IGNORED
    parts: list[Any] = []
    healer._loop.record.part_limit = 2
    for part in healer.microbatches(batch, count="labels"):
        with part:
            parts.append((part.weight, part.first, part.last))
    assert parts == [(1.0, True, True)]
