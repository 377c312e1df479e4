"""Without a `loss_fn`: a rollback for weights that are not finite, otherwise alerts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from healcore import Checkpoints, Healer, Logging
from tests.torch.driver.compared_run import (
    CHANGE,
    Run,
    always,
    events,
    left_alone,
    once,
)


def growing(run: Run, since: int = CHANGE - 30) -> Any:
    """A term of the loss that triples with each step, as at a rate that is too high."""

    def grow(healer: Healer) -> None:
        age = healer.step - since
        run.weight = 0.0 if age < 0 else min(1e3, 1e-7 * 3.0**age)

    return grow


def test_other_data_cause_no_rollback(tmp_path):
    run = Run()
    run.relabelled_from = CHANGE
    left_alone(tmp_path, run.train(tmp_path, asks=False))
    assert {e["verdict"] for e in events(tmp_path, "assessment")} <= {"unknown"}
    assert run.unseen_loss() < 0.5, "the new labels were learnt"


def test_a_term_that_grows_by_design_is_left_alone(tmp_path):
    run = Run()
    left_alone(tmp_path, run.train(tmp_path, at=growing(run), asks=False))


def test_weights_that_are_not_finite_are_rolled_back(tmp_path):
    run = Run()

    def damage() -> None:
        next(run.model.parameters())[0, 0] = torch.nan

    healer = run.train(tmp_path, at=once(CHANGE, damage), asks=False)
    assert {e["by"] for e in events(tmp_path, "assessment")} == {"weights"}
    assert healer.rollbacks == 1
    assert all(p.isfinite().all() for p in run.model.parameters())


@pytest.mark.parametrize("every", [1, 2])
def test_steps_that_are_not_finite_for_long_are_skipped_while_the_weights_are_finite(
    tmp_path, every
):
    """In a row, or every other step."""
    run = Run()

    def overflow(healer: Healer) -> None:
        bad = healer.step >= CHANGE and healer.step % every == 0
        run.weight = math.inf if bad else 0.0

    healer = run.train(tmp_path, at=overflow, asks=False)
    found = {(e["verdict"], e["by"]) for e in events(tmp_path, "assessment")}
    assert found == {("unknown", "nothing")}
    left_alone(tmp_path, healer)


def test_a_finite_edit_of_the_weights_in_the_loop_is_left_alone(tmp_path):
    run = Run()

    def prune() -> None:
        weight: Any = run.model[0].weight
        weight[weight.abs() < weight.abs().flatten().quantile(0.3)] = 0.0

    left_alone(tmp_path, run.train(tmp_path, at=always(CHANGE, prune), asks=False))


def test_several_optimizers_that_leave_gradients_in_each_other_can_be_saved(tmp_path):
    """A GAN's loop: the generator's backward reaches the discriminator."""
    torch.manual_seed(0)
    maker, judge = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
    state = {"maker": maker, "judge": judge, "makes": makes, "judges": judges}
    with Healer(
        "default",
        state=state,
        logging=Logging(events=tmp_path / "e.jsonl"),
        checkpoints=Checkpoints(every=10),
    ) as healer:
        for _ in healer.batches(range(35)):
            fake = maker(torch.randn(8, 2))
            judges.zero_grad()
            loss = torch.nn.functional.softplus(judge(fake.detach())).mean()
            healer.observe(loss, "judges")
            loss.backward()
            judges.step()
            makes.zero_grad()
            loss = torch.nn.functional.softplus(-judge(fake)).mean()
            healer.observe(loss, "makes")
            loss.backward()
            makes.step()
    assert [e["step"] for e in events(tmp_path, "save")][:4] == [0, 10, 20, 30]
