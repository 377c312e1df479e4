"""The first batch tries `Healer(loss_fn=...)`, and the run ends as without healcore."""

import contextlib
import random
from collections import UserDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

from healcore import Healer, Logging
from healcore.errors import SignalError
from healcore.jax import protect

calls: list[Any] = []
Alone: Any = type("Alone", (tuple,), {"__new__": lambda c, x: tuple.__new__(c, [x])})  # not (x,)


def batches() -> list[Any]:
    make = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(8, 4, generator=make), "more": Alone(torch.randn(8, 1, generator=make))}
        for _ in range(120)
    ]


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch["x"]) - batch["more"][0]).square().mean()


def warm_up(model: nn.Module, batch: Any) -> torch.Tensor:
    calls.append(batch)
    return mse(model, batch) * min(1, len(calls) / 50)


def draws(model: nn.Module, batch: Any) -> torch.Tensor:
    mask = torch.from_numpy(np.random.rand(8, 4) > 0.5)  # noqa: NPY002
    return (model(batch["x"] * mask + random.random()) - batch["more"][0]).square().mean()


def run(function: Callable[..., Any], data: list[Any], *, healed: bool) -> tuple[torch.Tensor, Any]:
    """The weights and the Healer of a run that skips batches that are None or too short."""
    calls.clear()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    state = {"model": model, "optimizer": optimizer}
    loss_fn = function if isinstance(function, nn.Module) else lambda batch: function(model, batch)
    log = Logging(console=False)
    healer = Healer("default", state=state, loss_fn=loss_fn, logging=log) if healed else None
    with healer or contextlib.nullcontext():
        for batch in healer.batches(data) if healer else data:
            if batch is None or len(batch) < 2:
                continue
            (healer.loss(batch) if healer else loss_fn(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach(), healer


@pytest.mark.parametrize(("kind", "skipped"), [(mse, []), (draws, []), (mse, [None, {}])])
def test_the_first_batch_changes_no_random_state(kind, skipped):
    """Nor do batches before it, which the loop skips."""
    expected, _ = run(kind, batches(), healed=False)
    weights, _ = run(kind, [*skipped, *batches()], healed=True)
    assert torch.equal(weights, expected)


def test_weights_are_not_compared_by_a_loss_fn_with_state_or_if_the_batch_is_donated(caplog):
    run(warm_up, batches()[:4], healed=True)
    assert "keeps state" in caplog.text
    assert len(calls) == 4 + 2, "a comparison would call it more often"
    caplog.clear()
    jax_run(lambda state, batch: batch[1], donated=True)
    assert caplog.text.count("donated the batch") == 1
    assert "checkpoint 5 is" not in caplog.text, "the batches cannot be saved"
    assert "was not saved" not in caplog.text


def test_a_loss_fn_that_donates_its_state_is_an_error_that_says_so(caplog):
    donates = jax.jit(lambda state, batch: (batch.sum(), state), donate_argnums=0)
    with pytest.raises(SignalError, match="remove donate_argnums from loss_fn"):
        jax_run(donates)
    assert "healer.update" not in caplog.text


@pytest.mark.parametrize("convert", [dict, UserDict])
@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda batch: batch.pop("x"), "'x'"),
        (lambda batch: batch["more"][0].clamp_(0), "changes its batch"),
    ],
)
def test_a_loss_fn_that_changes_its_batch_is_an_error(convert, write, said):
    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mse(model, batch)
        write(batch)
        return loss

    with pytest.raises(SignalError) as raised:
        run(loss_fn, [convert(each) for each in batches()[:3]], healed=True)
    assert said in str(raised.value)


def jax_run(loss_fn: Any, read: Any = Healer.batches, count: int = 5, **how: Any) -> None:
    tx = protect(optax.sgd(0.1))
    params = {"w": jnp.ones(2)}
    state = {"params": params, "opt": tx.init(params)}
    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for batch in read(healer, [jnp.array([float(i), 1.0]) for i in range(count)]):
            old = healer.state
            updates, opt = tx.update({"w": batch}, old["opt"], value=jnp.float32(1.0))
            new = {"params": optax.apply_updates(old["params"], updates), "opt": opt}
            healer.update(new, batch=batch if how.get("named") else None)
            if how.get("donated"):
                batch.delete()


@pytest.mark.parametrize(
    ("loss_fn", "said"),
    [
        pytest.param(lambda state, batch: None, "one number, got NoneType", id="returns nothing"),
        pytest.param(lambda batch: 0.0, "loss_fn raised TypeError", id="takes one argument"),
        pytest.param(
            lambda state, batch: batch,
            r"one number, got ndarray \(2 numbers of shape",
            id="returns an array",
        ),
        pytest.param(
            lambda state, batch: (batch, batch.sum()),
            r"one number, got ndarray \(2 numbers of shape",
            id="returns a tuple with an array",
        ),
        pytest.param(
            lambda state, batch: {"cost": batch.sum()},
            "got dict .*cost",
            id="returns a dictionary without loss",
        ),
    ],
)
def test_a_wrong_loss_fn_is_an_error_at_the_first_batch(loss_fn, said):
    with pytest.raises(SignalError, match="(?s)" + said):
        jax_run(loss_fn)


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_loop_that_reads_its_own_batches_has_to_name_them(named, caplog):
    def own(healer: Any, data: Any) -> Any:
        return (data[number] for number in healer.steps(len(data)))

    calls.clear()
    jax_run(lambda state, batch: calls.append(batch) or batch[1], own, 302, named=named)
    assert [bool(calls), caplog.text.count("no step had a batch")] == [named, not named]


@pytest.mark.parametrize(
    "returned", [lambda loss, out: (loss, out), lambda loss, out: {"loss": loss, "logits": out}]
)
def test_a_loss_fn_may_return_more_than_the_loss(returned, caplog):
    """`loss` passes it through, and comparisons use the loss in it."""
    calls.clear()
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def loss_fn(batch: Any) -> Any:
        calls.append(torch.is_grad_enabled())
        out = model(batch["x"])
        return returned((out - batch["more"][0]).square().mean(), out)

    with Healer(state={"model": model, "optimizer": optimizer}, loss_fn=loss_fn) as healer:
        for batch in healer.batches(batches()):
            result = healer.loss(batch)
            loss, out = result.values() if isinstance(result, dict) else result
            assert out.shape == (8, 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert healer.metrics()["heal/loss"] == loss.item()
    assert calls.count(False) >= 3, "compared"
    assert "loss_fn" not in caplog.text


def test_in_jax_a_loss_fn_may_return_more_than_the_loss(caplog):
    jax_run(lambda state, batch: (batch.sum(), {"batch": batch}))
    assert "loss_fn" not in caplog.text
