"""The first batch tries `Healer(loss_fn=...)`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax
import pytest
import torch
from torch import nn

from healcore import Healer
from healcore.errors import SignalError
from healcore.jax import protect

DATA = [[float(i), 1.0] for i in range(5)]


def torch_run(loss_fn: Any) -> None:
    """A run of five steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, loss_fn=lambda *given: loss_fn(model, *given)) as healer:
        for batch in healer.batches(DATA):
            loss = model(torch.tensor([batch, batch])).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def jax_run(loss_fn: Any) -> None:
    tx = protect(optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    state = {"params": params, "opt": tx.init(params)}
    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for batch in healer.batches([jnp.array(each) for each in DATA]):
            old = healer.state
            updates, opt = tx.update({"w": batch}, old["opt"], value=jnp.float32(1.0))
            healer.update({"params": optax.apply_updates(old["params"], updates), "opt": opt})


@pytest.mark.parametrize(
    ("run", "loss_fn", "said"),
    [
        (torch_run, lambda model: 0.0, "loss_fn raised TypeError on the first batch.*loss_fn"),
        (torch_run, lambda model, batch: torch.ones(2), "one number, got shape"),
        (torch_run, lambda model, batch: None, "must be a number, got None"),
        (torch_run, lambda model, batch: (0.5, 0.1), r"a tuple of 2.* instead of \(loss, aux\)"),
        (torch_run, lambda model, batch: {"loss": 0.5}, "got a dict of 1.*the number alone"),
        (jax_run, lambda batch: 0.0, "loss_fn raised TypeError on the first batch"),
        (jax_run, lambda state, batch: batch, r"one number, got shape \(2,\)"),
        (jax_run, lambda state, batch: (batch.sum(), batch), r"a tuple of 2.*loss instead of"),
    ],
)
def test_a_wrong_loss_fn_is_an_error_at_the_first_batch(run, loss_fn, said):
    with pytest.raises(SignalError, match="(?s)" + said):
        run(loss_fn)
