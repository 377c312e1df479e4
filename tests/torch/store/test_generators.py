"""Random generators of the program in a state: saved by value, and restored in place."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from healcore import Healer
from healcore.runtime.store.checkpoints import StateMismatch
from healcore.torch.store import apply
from tests.healer.run_directory import new_process
from tests.runtime.store.store_cases import DCP, TORCH_MEMORY, over

KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], list[float]]]] = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda each: torch.randn(3, generator=each).tolist(),
    ),
    "PCG64": (lambda: np.random.default_rng(3), lambda each: each.normal(size=3).tolist()),
    "MT19937": (
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda each: each.normal(size=3).tolist(),
    ),
    "Philox": (
        lambda: np.random.Generator(np.random.Philox(3)),
        lambda each: each.integers(9, size=3, dtype=np.int32).tolist(),
    ),
    "RandomState": (lambda: np.random.RandomState(3), lambda each: each.normal(size=3).tolist()),
    "random": (lambda: random.Random(3), lambda each: [each.gauss(0, 1) for _ in range(3)]),
}
"""Makes a generator, and draws from it an odd number of values, of which some are made in pairs."""


@over(DCP, TORCH_MEMORY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_generator_draws_the_same_numbers(case, kind: str, tmp_path: Path):
    make, draw = KINDS[kind]
    alone, inner = make(), make()
    live = {"alone": alone, "several": {"inner": inner, "list": [inner]}}
    draw(alone)
    store = case.make(tmp_path)
    store.save(1, live)
    expected = draw(alone), draw(inner)
    draw(alone)
    apply(live, store.restore(1, live).state)
    assert live["several"]["inner"] is inner
    assert live["several"]["list"][0] is inner
    assert (draw(alone), draw(inner)) == expected


def test_another_kind_of_generator_is_no_match(tmp_path: Path):
    live = {"g": np.random.default_rng(3)}
    store = DCP.make(tmp_path)
    store.save(1, live)
    for other in (random.Random(3), np.random.Generator(np.random.Philox(3)), torch.Generator()):
        with pytest.raises(StateMismatch, match="cannot be changed in place"):
            apply({"g": other}, store.restore(1, {"g": other}).state)


class Interrupted(Exception):
    """Raised by the program itself."""


def train(store: Path, until: int = -1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows, noise = np.random.default_rng(1), torch.Generator().manual_seed(2)
    data = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    state = {"model": model, "optimizer": optimizer, "noise": noise, "own": {"rows": rows}}
    with Healer("default", state=state, store=store) as healer:
        for step in healer.steps(130):
            if step == until:
                raise Interrupted
            batch = data[rows.integers(100, size=8)]
            batch = batch + 0.1 * torch.randn(8, 4, generator=noise)
            loss = (model(batch) - 1).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*model.parameters()]


def test_a_restart_samples_as_the_killed_run_would_have(tmp_path: Path):
    undisturbed = train(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(tmp_path / "killed", until=120)
    new_process()
    assert all(map(torch.equal, train(tmp_path / "killed"), undisturbed))
