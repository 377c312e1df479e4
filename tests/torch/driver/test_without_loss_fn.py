"""Without a `loss_fn`: a rollback for weights that are not finite, otherwise alerts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from healcore import Healer
from tests.torch.driver.compared_run import (
    CHANGE,
    Run,
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
