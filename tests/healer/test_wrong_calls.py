"""Calls that a Healer refuses: outside of its block, of the other framework, of wrong types."""

import contextlib
from typing import Any

import pytest
import torch

import healcore
from healcore import Healer, Logging
from healcore.errors import HealerError, IncompleteRun, UnknownState
from tests.healer.training_loops import loop_of, rules


def test_methods_that_are_called_outside_of_the_block_say_so():
    loop = loop_of("torch")
    healer = Healer(rules(), state=loop.state)
    with pytest.raises(RuntimeError, match="with Healer"):
        healer.observe(1.0)
    with healer:
        for number in healer.batches(range(2)):
            loop.step(healer, number)
    with pytest.raises(RuntimeError, match="has ended"):
        next(healer.batches([1]))
    with pytest.raises(RuntimeError, match="opened once"), healer:
        pass


@pytest.mark.parametrize(
    ("framework", "method", "arguments", "advice"),
    [
        ("torch", "update", {"state": None}, "healer.after_step()"),
        ("torch", "scan", {"update": None, "state": None, "steps": 5, "every": 5}, "healer.steps"),
        ("jax", "loss", {"batch": 1}, "value=loss"),
        ("jax", "observe", {"loss": 1.0}, "value=loss"),
    ],
)
def test_a_method_of_the_other_framework_says_what_to_write(framework, method, arguments, advice):
    def loss_fn(*given: Any) -> Any:
        raise AssertionError("a Healer calls loss_fn only after a step")

    loop = loop_of(framework, policy=rules())
    healer = Healer(rules(), state=loop.state, loss_fn=loss_fn)
    # The first is of the end of the block: the run has taken no step.
    with pytest.raises(IncompleteRun), healer, pytest.raises(HealerError) as raised:
        getattr(healer, method)(**arguments)
    message = str(raised.value)
    wanted, given = ("JAX", "torch") if framework == "torch" else ("torch", "JAX")
    assert f"healer.{method}(" in message
    assert f"is for {wanted}, and the state of this Healer is of {given}: " in message
    assert advice in message


def test_arguments_of_other_types_are_refused():
    state = loop_of("torch").state
    with pytest.raises(ValueError, match=r"store is a path, .* not ''"):
        Healer(rules(), state=state, store="")
    with pytest.raises(ValueError, match="events is a path"):
        Logging(events=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="epochs is a whole number >= 1, or None"):
        Healer(rules(), state=state).batches([1], epochs=0)
    with pytest.raises((TypeError, ValueError), match=r"nothing of torch|no healing state"):
        Healer(rules(), state={}).__enter__()
    in_jax = loop_of("jax", policy=rules()).state
    with pytest.raises(
        UnknownState, match=r"\(engine\), and this state is of jax: pass no `attach`"
    ):
        Healer(rules(), state=in_jax, attach={"engine": "host"}).__enter__()


def test_steps_without_gradients_have_a_warning_and_an_error_that_names_the_cause(caplog):
    """`zero_grad` is called between `backward` and `step`, so no step has a gradient."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    said = "called 100 times, and no parameter had a gradient"

    def train() -> None:
        with Healer(state={"model": model, "optimizer": optimizer}) as healer:
            for number, batch in enumerate(healer.batches([torch.ones(4, 2)] * 110)):
                assert (said in caplog.text) == (number >= 100)
                loss = model(batch).square().mean()
                healer.observe(loss)
                loss.backward()
                optimizer.zero_grad()
                optimizer.step()

    with pytest.raises(IncompleteRun, match=r"110 batches read.*called 110 times") as error:
        train()
    assert "zero_grad() is not called between backward() and step()" in str(error.value)
    assert caplog.text.count("no parameter had a gradient") == 1


@pytest.mark.parametrize("reads", [True, False])
def test_steps_that_nobody_reads_have_one_line(reads: bool, caplog):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with contextlib.suppress(IncompleteRun), Healer(state={"m": model, "o": optimizer}) as healer:
        for _ in range(40):
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()
            if reads:
                healer.after_step()
    lines = [r.message for r in caplog.records if "nor healer.after_step()" in r.message]
    assert len(lines) == (not reads)
    for line in lines:
        assert line.startswith("20 steps, and "), "soon enough to start again"
        assert "ends with status 1" in line


def test_an_optimizer_that_trains_later_needs_no_warning(caplog):
    models = {"first": torch.nn.Linear(2, 1), "second": torch.nn.Linear(1, 1)}
    optimizers = {f"of {k}": torch.optim.SGD(m.parameters(), 0.1) for k, m in models.items()}
    with Healer(state={**models, **optimizers}) as healer:
        for batch in healer.batches([torch.ones(4, 2)] * 30):
            loss = models["first"](batch).square().mean()
            healer.observe(loss)
            loss.backward()
            for optimizer in optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    assert "no parameter had a gradient" not in caplog.text


def test_the_warning_of_a_missing_scheduler_points_to_the_line_of_the_program():
    def begin_by_start(**arguments: Any) -> None:
        healcore.start(**arguments)._end(ValueError())

    def begin_by_block(**arguments: Any) -> None:
        Healer(**arguments).__enter__()

    for begin in (begin_by_start, begin_by_block):
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with pytest.warns(UserWarning, match="a learning-rate scheduler drives") as warned:
            begin(state={"model": model, "optimizer": optimizer})
        assert [each.filename for each in warned] == [__file__]
