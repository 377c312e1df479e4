"""A run that a broken program has stopped, and that is started again with the program mended.

A remedy is a try: what the tries have changed for the trouble of a stop is undone at the next
start, so the mended program trains as if the broken part had not been.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from healcore import Healer
from healcore.errors import RunStopped
from healcore.runtime.run.ending import stopping
from healcore.runtime.store.manifest import scan
from tests.healer.run_directory import events, new_process
from tests.healer.simulated_kills import Crash, die_at_the_end
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    Faults,
    JaxLoop,
    TorchLoop,
    at,
    breaks_off,
    loop_of,
    rules,
    same,
    train,
)
from tests.open_run import run_of

STEPS, BROKEN_FROM = 60, 33
POLICY = rules()
"""Rolls back and cuts the rate at the first bad step, up to three times."""
TRIES = 3
"""Rollbacks of one start. One of them leaves out the batch after which NaN was there."""


class BrokenTorch(TorchLoop):
    """Writes NaN into a weight after each step from `BROKEN_FROM` on."""

    def step(self, healer: Healer | None, number: Any) -> None:
        super().step(healer, number)
        assert healer is not None
        if healer.step >= BROKEN_FROM:
            next(self.model.parameters()).data[0] = np.nan


class BrokenJax(JaxLoop):
    """Returns a state with a weight of NaN from each step from `BROKEN_FROM` on."""

    def step(self, healer: Healer | None, number: Any) -> None:
        assert healer is not None
        state = self.compiled_step(healer.state, *self.faults.batch(int(number)))
        if healer.step >= BROKEN_FROM:
            params = {**state["params"], "b1": state["params"]["b1"].at[0].set(jnp.nan)}
            state = {**state, "params": params}
        healer.update(state)


def run_broken(framework: str, store: Path, faults: Faults | None = None) -> None:
    """A start of the broken program, which the policy stops."""
    loop = BrokenTorch(faults) if framework == "torch" else BrokenJax(faults, POLICY)
    with pytest.raises(RunStopped) as stop:
        train(loop, POLICY, range(STEPS), store=store)
    assert stop.value.code
    new_process()


def run_mended(framework: str, store: Path, faults: Faults | None = None) -> Any:
    """A start of the mended program. Returns the loop."""
    loop = loop_of(framework, faults, POLICY)
    train(loop, POLICY, range(STEPS), store=store)
    return loop


def plain(framework: str) -> Any:
    """The mended program from its first step."""
    loop = loop_of(framework, None, POLICY)
    train(loop, POLICY, range(STEPS))
    return loop


@BOTH_FRAMEWORKS
def test_a_mended_program_trains_as_if_it_had_not_been_broken(framework, tmp_path, capsys):
    run_broken(framework, tmp_path)
    assert len(events(tmp_path, "rollback")) == TRIES
    oldest = min(each["checkpoint"] for each in events(tmp_path, "rollback"))
    which = f"the checkpoint of step {oldest}, the oldest one that a rollback has restored"
    assert which in capsys.readouterr().err
    loop = run_mended(framework, tmp_path)
    assert same(loop.weights(), plain(framework).weights())
    (resume,) = events(tmp_path, "resume")
    assert resume["checkpoint"] == min(each["checkpoint"] for each in events(tmp_path, "rollback"))


def test_a_program_that_is_still_broken_stops_again(tmp_path):
    """After the same number of tries, each time."""
    for start in range(1, 4):
        run_broken("torch", tmp_path)
        assert len(events(tmp_path, "rollback")) == TRIES * start
    loop = run_mended("torch", tmp_path)
    assert same(loop.weights(), plain("torch").weights())


def test_what_healed_earlier_trouble_stays(tmp_path):
    """The batch that an earlier rollback has skipped is not read again."""
    bad = 13
    faults = Faults(always=[bad])
    run_broken("torch", tmp_path, faults)
    loop = run_mended("torch", tmp_path, faults)
    assert faults.seen[bad] == 1
    assert loop.faults.order[-1] == STEPS - 1


def killed(at: Any, name: str, patch: pytest.MonkeyPatch) -> None:
    """Ends the next run at the first call of a function, as the death of its process does."""

    def kill(*args: Any, **kwargs: Any) -> None:
        raise Crash

    patch.setattr(at, name, kill)
    die_at_the_end(patch)


def test_a_kill_directly_after_the_stop_was_written(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        killed(stopping.RunOutcome, "of", patch)
        with pytest.raises(Crash):
            train(BrokenTorch(), POLICY, range(STEPS), store=tmp_path)
    new_process()
    loop = run_mended("torch", tmp_path)
    assert same(loop.weights(), plain("torch").weights())


def test_a_break_before_the_first_save_of_the_mended_program(tmp_path):
    run_broken("torch", tmp_path)
    first = min(each["checkpoint"] for each in events(tmp_path, "rollback"))
    breaks_off(loop_of("torch"), POLICY, range(STEPS), at=first + 2, store=tmp_path)
    new_process()
    loop = run_mended("torch", tmp_path)
    assert same(loop.weights(), plain("torch").weights())


def test_a_kill_after_the_record_keeps_the_work_that_follows_a_save_in_the_body(
    tmp_path, monkeypatch
):
    """The end that goes back on disk writes the record of the checkpoint, and is killed."""

    class Saving(TorchLoop):
        def step(self, healer: Any, number: int) -> None:
            super().step(healer, number)
            if number == 6:
                healer.save()

    def repeat(healer: Any) -> None:
        assert run_of(healer).way_back.before_next_start(7) == 7
        raise Crash

    def kill(healer: Any) -> None:
        raise Crash

    for loop, before in (Saving(), at(9, repeat)), (TorchLoop(), at(7, kill)):
        with monkeypatch.context() as patch:
            die_at_the_end(patch)
            with pytest.raises(Crash):
                train(loop, POLICY, range(STEPS), store=tmp_path, save_every=50, before=before)
        new_process()
        assert (scan(tmp_path)[0][7][0].manifest.record or {})["is_in_body"]


@pytest.mark.slow  # a run without finite steps stops after 1,000 of them
def test_a_dead_run_is_as_if_it_had_not_died(tmp_path):
    """The weights stay finite, and three attempts to bring the run back have not helped."""
    steps = 1200
    broken = loop_of("torch", Faults(always=range(40, steps)))
    with pytest.raises(RunStopped):
        train(broken, "default", range(steps), store=tmp_path, save_every=10)
    assert len(events(tmp_path, "rollback")) == 3
    new_process()
    mended = loop_of("torch")
    train(mended, "default", range(steps), store=tmp_path, save_every=10)
    undisturbed = loop_of("torch")  # made here: it sets the seed
    train(undisturbed, "default", range(steps), save_every=10)
    assert same(mended.weights(), undisturbed.weights())
