"""Loops that end by themselves and whose runs are not complete: no status 0, no "nothing to do"."""

from __future__ import annotations

from typing import Any

import pytest

from healcore import Healer, RunStopped
from healcore.errors import IncompleteRun
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import EVERY_5, SKIPS, Faults, loop_of, rules, train
from tests.jax.driver.small_runs import batch, in_place

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


def ended(folder: Any) -> list[str]:
    return [each["ending"] for each in events(folder, "end")]


@BOTH
def test_a_run_without_a_step_is_an_error_and_the_next_start_trains(framework, tmp_path):
    loop = loop_of(framework, policy=rules())
    line = {"torch": r"optimizer\.step\(\)", "jax": r"healer\.update\(step\(healer\.state"}
    for _ in range(2):
        with (
            pytest.raises(IncompleteRun, match=rf"no step \(12 batches .*{line[framework]}"),
            Healer(rules(), state=loop.state, store=tmp_path) as healer,
        ):
            for _number in healer.batches(range(12)):
                pass
    assert ended(tmp_path) == ["exception"] * 2
    assert train(loop, rules(), range(12), store=tmp_path)["step"] == 12
    assert loop.faults.order == list(range(12))
    assert ended(tmp_path)[-1] == "completed"


@pytest.mark.parametrize("framework", ["torch", "nnx"])
def test_steps_that_the_healer_does_not_see_are_an_error(framework, tmp_path):
    """In JAX `update` is what shows a step; objects that change in place need `batches`."""
    policy = rules()
    loop = loop_of("torch") if framework == "torch" else in_place(policy)
    healer = Healer(policy, state=loop.state, store=tmp_path).__enter__()
    for number in range(12):
        if framework == "torch":
            loop.step(healer, number)
        else:
            loop.step(healer.state, batch(number))
    with pytest.raises(IncompleteRun, match=r"without the Healer.*for batch in healer\.batches"):
        healer.__exit__(None, None, None)
    assert ended(tmp_path) == ["exception"]
    assert events(tmp_path, "save")[-1]["step"] > 0, "the last state is saved"


@BOTH
def test_a_run_that_skips_most_of_its_data_is_stopped(framework, tmp_path):
    loop = loop_of(framework, Faults(always=range(4, 20)), SKIPS)
    with pytest.raises(RunStopped, match="of 20 steps, 16 were skipped"):
        train(loop, SKIPS, range(20), store=tmp_path)
    assert ended(tmp_path) == ["stopped"]
    assert events(tmp_path, "save")[-1]["step"] == 20
    with pytest.raises(RunStopped):  # and not "nothing to do" with status 0
        train(loop_of(framework, policy=SKIPS), SKIPS, range(20), store=tmp_path)


@BOTH
def test_a_break_before_the_end_of_the_data_is_resumed(framework, tmp_path, caplog):
    loop = loop_of(framework, policy=rules())

    def run(limit: int, **options: Any) -> None:
        with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
            for number in healer.batches(range(12), **options):
                loop.step(healer, number)
                if number == limit:
                    break

    with caplog.at_level("INFO", "healcore"):
        run(7)
    assert "ended by a `break` in epoch 0, before batch 8 of 12, after step 8" in caplog.text
    (found,) = postmortems(tmp_path)
    assert (found["ending"], found["step"]) == ("requested", 8)
    assert events(tmp_path, "save")[-1]["step"] == 8
    loop = loop_of(framework, policy=rules())
    run(11)  # at the last batch: that is no early end
    assert loop.faults.order == [8, 9, 10, 11]
    assert ended(tmp_path) == ["requested", "completed"]
