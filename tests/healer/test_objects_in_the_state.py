"""Objects in the state that answer every attribute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from flax import nnx
from torch import nn

from healcore import Healer
from healcore.jax import protect


class Answers:
    """An object of the user that has a value for every attribute."""

    seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return "a value"


def nnx_run(rngs: Any, store: Any, steps: int) -> float:
    """A run with noise from `rngs`, which ends with an exception after `steps` steps."""
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, protect(optax.sgd(0.1)), wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer, "rngs": rngs}
    with Healer("default", state=state, store=store) as healer:
        for x in healer.batches([jnp.full((4, 2), 0.1 * i) for i in range(6)]):
            if healer.step == steps:
                raise KeyboardInterrupt
            x = x + jax.random.normal(rngs(), x.shape)
            grads = nnx.grad(lambda model, x=x: (model(x) ** 2).mean())(model)
            optimizer.update(model, grads, value=jnp.float32(1.0))
    return float(model.kernel[...].sum())


@pytest.mark.parametrize("make", [lambda: nnx.Rngs(7), lambda: nnx.Rngs(7)["default"]])
def test_generators_of_nnx_resume_exactly(make, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        nnx_run(make(), tmp_path / "killed", 3)
    expected = nnx_run(make(), tmp_path / "whole", -1)
    assert nnx_run(make(), tmp_path / "killed", -1) == expected


def test_an_object_of_the_user_in_torch_is_only_saved(tmp_path):
    model, counter = nn.Linear(2, 1), Answers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer, "counter": counter}
    with Healer("default", state=state, store=tmp_path) as healer:
        for x in healer.batches(list(torch.randn(6, 4, 2))):
            healer.observe(loss := model(x).square().mean())
            loss.backward()
            optimizer.step()
            counter.seen += 1
    assert counter.seen == healer.step == 6, "no trainer owns the loop"
