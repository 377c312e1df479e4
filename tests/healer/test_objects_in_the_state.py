"""Objects in the state that answer every attribute."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from healcore import Healer
from healcore.jax import protect


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
