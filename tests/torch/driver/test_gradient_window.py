"""A step in smaller parts has the gradient, the loss and the outcome of the whole step."""

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from healcore.runtime.healer import Healer
from healcore.runtime.run.ending.exits import IncompleteRun
from healcore.torch.driver import gradient_window
from healcore.torch.trainers.hook import healings_of
from tests.open_run import run_of
from tests.torch.driver.out_of_memory_runs import ACCUMULATED, BATCH, STEPS, FailAt, train

VOCABULARY, IGNORED = 11, -100


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


@pytest.fixture(scope="module")
def run():
    """A healer, and a model that gives a class to each token."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 5), nn.Tanh(), nn.Linear(5, VOCABULARY))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with contextlib.suppress(IncompleteRun), Healer(state=state) as healer:
        yield healer, model


@settings(max_examples=60)
@given(
    batch=st.builds(
        tokens,
        seed=st.integers(0, 99),
        samples=st.integers(1, 33),
        length=st.integers(1, 9),
        ignored=st.sampled_from([0.0, 0.5, 0.95]),
    ),
    most=st.integers(1, 33),
)
@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (entropy, {"count": "labels"}),
        (entropy, {"count": lambda part: (part["labels"] != IGNORED).sum()}),
        (per_sample, {}),
    ],
    ids=["tokens by key", "tokens by function", "samples"],
)
def test_parts_of_a_batch_have_its_gradient_and_its_mean_loss(run, loss_fn, options, batch, most):
    healer, model = run
    loss = loss_fn(model, batch)
    loss.backward()
    expected = gradients(model)
    run_of(healer).record.part_size.limit = most
    for part in healer.microbatches(batch, **options):
        with part:
            loss_of_part = loss_fn(model, part.batch)
            healer.observe(loss_of_part)
            (loss_of_part * part.weight).backward()
    assert float((gradients(model) - expected).norm() / expected.norm()) < 1e-6
    observed: Any = healings_of(healer)["optimizer"].healed_step.measurer.losses
    assert float(observed.mean()) == pytest.approx(loss.item(), rel=1e-6)
    observed.clear()


def test_a_part_without_a_token_that_counts_is_left_out(run):
    """Its mean is NaN, and 0 times that too."""
    healer = run[0]
    batch = tokens(0, 4, 3, 0.0)
    parts: list[Any] = []
    batch["labels"][2:] = IGNORED
    run_of(healer).record.part_size.limit = 2
    for part in healer.microbatches(batch, count="labels"):
        with part:
            parts.append((part.weight, part.first, part.last))
    assert parts == [(1.0, True, True)]


HALF = BATCH // 2


def outcome(found: dict[str, Any]) -> Any:
    """Weights, batch statistics, the judged losses, sizes of parts, and the next random number."""
    assert not found["raised"], found["raised"]
    return [found[name] for name in ("weights", "buffers", "losses", "sizes", "draws")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [19, pytest.param(1, marks=pytest.mark.stress)], ids=["some", "all"]
)
def test_a_failure_at_any_operation_ends_as_a_run_split_from_that_step(tmp_path, every):
    """The result equals, to the bit, a run that was split from the start of that step."""
    fails_never = FailAt()
    whole = train(tmp_path, fails_never)
    assert whole["sizes"] == [[BATCH] * ACCUMULATED] * STEPS
    expected = [
        train(tmp_path / f"from {step}", most=lambda now, s=step: HALF if now >= s else None)
        for step in range(STEPS)
    ]
    steps = set()
    for number in range(1, fails_never.count + 1, every):
        found = train(tmp_path / str(number), FailAt(number))
        step = next(i for i, sizes in enumerate(found["sizes"]) if sizes[0] == HALF)
        steps.add(step)
        assert outcome(found) == outcome(expected[step]), number
    assert steps == set(range(STEPS))


def test_a_redone_window_may_fail_again(tmp_path):
    found = train(tmp_path / "a", FailAt(5, 40))
    assert outcome(found) == outcome(train(tmp_path / "b", most=lambda step: HALF // 2))


def test_a_failed_trial_of_larger_parts_at_any_operation(tmp_path):
    """Also in the second batch of a window. The result is that of parts that never grew."""

    def half_at_first(step: int) -> int | None:
        return HALF if step == 0 else None

    expected = train(tmp_path / "split", most=lambda step: HALF)
    fails_never = FailAt()
    grown = train(tmp_path / "grown", fails_never, most=half_at_first, wait=1)
    assert grown["sizes"] == [[HALF, HALF] * ACCUMULATED, *[[BATCH] * ACCUMULATED] * 2]
    counts = FailAt()
    step_0 = train(tmp_path / "counted", counts, most=lambda step: HALF)["sizes"][0]
    assert len(step_0) == 2 * ACCUMULATED
    first, last = counts.count // STEPS + 1, (counts.count // STEPS + fails_never.count) // 2
    numbers = range(first, last, 9)
    assert len(numbers) > 3
    for number in numbers:
        fail = FailAt(number)
        found = train(tmp_path / str(number), fail, most=half_at_first, wait=1)
        assert [step for step, _ in found["faults"]] == [1], number
        assert outcome(found) == outcome(expected), number


def test_the_cache_of_the_device_is_freed_before_the_step_is_repeated(tmp_path, monkeypatch):
    calls = []
    device = SimpleNamespace(empty_cache=lambda: calls.append(1))
    fake = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda **_: None)
    monkeypatch.setattr(gradient_window.torch, "accelerator", fake)
    monkeypatch.setattr(gradient_window.torch, "get_device_module", lambda kind: device)
    train(tmp_path, FailAt(5))
    assert calls == [1]
