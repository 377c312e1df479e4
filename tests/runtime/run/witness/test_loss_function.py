"""The user's `loss_fn`: errors, parts of a batch, and the calls that the loop saves."""

from typing import Any

import pytest

from healcore.runtime.run.witness.evidence import ObservedBatch, TrainedStep
from tests.runtime.run.witness.toy_driver import LASTS, healthy_run, noisy, train_damaged


def missing_key(weight: float, batch: int) -> Any:
    raise KeyError("labels")


def several_numbers(weight: float, batch: int) -> Any:
    return [1.0, 2.0]


@pytest.mark.parametrize(
    ("failure", "trouble", "error"),
    [
        pytest.param(missing_key, 0, "KeyError", id="raises"),
        pytest.param(several_numbers, 40, "SignalError", id="no number while a verdict is pending"),
    ],
)
def test_a_loss_fn_that_fails_later_is_not_called_again(failure, trouble, error):
    """`trouble` is the number of damaged steps before the first failure. The run can still end."""
    failed_on = []

    def loss(weight: float, batch: int) -> Any:
        if batch < 250 + trouble:
            return noisy(weight, batch)
        failed_on.append(batch)
        return failure(weight, batch)

    run = healthy_run(250, loss)
    assert train_damaged(run, trouble) is None
    for _ in range(LASTS):
        assert run.take(run.step, weight=9.0, alarm=True, loss=9.0) is None

    assert len(failed_on) == 1
    assert not run.witness.is_enabled
    assert run.witness.decide_at_end() is None
    assert not run.witness.state.anchors, "their memory is free"
    (line,) = run.warnings
    assert error in line


def test_parts_of_a_batch_count_by_their_weights():
    """The mean over an accumulation equals the training loss."""
    run = healthy_run(250, lambda weight, batch: weight + batch)
    first = run.witness.state.anchors[0]
    parts = (ObservedBatch(1.0, weight=0.75), ObservedBatch(5.0, weight=0.25))
    mean = 0.75 * 1.0 + 0.25 * 5.0

    found: Any = run.witness.losses_of([TrainedStep(run.step, parts)], first)

    [(now, then)] = found
    assert now == pytest.approx(run.driver.weight + mean)
    assert then == pytest.approx(10.0 + mean), "the first weight is 10"
