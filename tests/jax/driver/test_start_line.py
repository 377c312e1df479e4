"""What the first line of a run says about the learning rate."""

import jax.numpy as jnp
import optax
import pytest

from healcore import Healer
from healcore.errors import IncompleteRun
from healcore.jax import protect

WARM_UP = optax.linear_schedule(0.0, 0.1, 10)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (optax.inject_hyperparams(optax.sgd)(0.1), ", learning rate 0.1;"),
        (optax.inject_hyperparams(optax.sgd)(WARM_UP), ", learning rate 0;"),
        (optax.sgd(0.1), "; checkpoints"),  # perhaps the step passes the rate
    ],
)
def test_the_first_line_says_which_rate_is_known(optimizer, text, capsys):
    params = {"w": jnp.ones(2)}
    tx = protect(optimizer)
    healer = Healer("default", state=(params, tx.init(params)))
    with pytest.raises(IncompleteRun), healer:
        pass  # without a step
    assert f"policy default{text}" in capsys.readouterr().err
