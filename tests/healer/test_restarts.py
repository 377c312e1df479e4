"""What a start after a crash must know and do. All at once and with SIGKILL: test_killed.py."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from healcore import Healer
from healcore import policy as policies
from tests.healer.run_directory import events
from tests.healer.simulated_kills import Crash
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    EVERY_5,
    Faults,
    TrainingResult,
    breaks_off,
    broken_at,
    loop_of,
    rules,
    train,
)
from tests.open_run import run_of

NEVER = -1


def train_with_poison(
    policy: Any, *, shows: int, poisoned_at: int = NEVER, breaks_at: int = NEVER, **options: Any
) -> TrainingResult:
    """Trains with weights that become too large at a step.

    The loss is finite until the step `shows`. From then on, it is NaN while the weights are large.
    The run breaks off at `breaks_at`, once its checkpoints are written.
    """
    loop = loop_of("torch")
    bias = loop.first.bias.data

    def before(healer: Any, number: int) -> None:
        if number == poisoned_at and not healer.rollbacks:
            bias.add_(1e8)
        if number == breaks_at:
            run_of(healer).store.wait()
            raise RuntimeError("power")
        is_poisoned = bias.max() > 1e6
        loop.faults.always = frozenset([number] if number >= shows and is_poisoned else [])

    result = train(loop, policy, before=before, **options)
    assert bias.max() < 1e6
    return result


def restored_steps(store: Path) -> list[int]:
    """The checkpoints to which the rollbacks of a run went."""
    return [event["checkpoint"] for event in events(store, "rollback")]


def test_a_checkpoint_whose_state_breaks_again_is_not_restored_twice(tmp_path):
    # The checkpoint of step 10 is poisoned, and no checkpoint becomes known-good.
    policy = policies.load(rules(cut=False), rollback={"probation": 1000})
    options: dict[str, Any] = {"shows": 12, "data": range(30), "store": tmp_path}
    with pytest.raises(RuntimeError, match="power"):
        train_with_poison(policy, poisoned_at=8, breaks_at=11, **options)

    result = train_with_poison(policy, **options)

    assert result.rollbacks == 2
    assert restored_steps(tmp_path) == [10, 0]


def test_skipped_batches_stay_skipped_in_every_later_process(tmp_path):
    """Killed long after the first rollback; the second one goes past the first one's window."""
    faults = Faults(always=[13, 31])
    breaks_off(loop_of("torch", faults), rules(), range(50), at=27, store=tmp_path)
    train(loop_of("torch", faults), rules(), range(50), store=tmp_path)

    first, second = events(tmp_path, "rollback")
    assert second["checkpoint"] < first["onset"], "the test needs a deep one"
    assert faults.seen[13] == 1


@pytest.mark.slow
def test_damage_of_long_ago_is_left_behind(tmp_path):
    """The run goes back one checkpoint, then three, then five, ..."""
    policy = policies.load(rules(cut=False, recoveries=8), rollback={"deepen": 2})
    result = train_with_poison(
        policy, poisoned_at=10, shows=28, data=range(40), store=tmp_path, save_every=2
    )
    *before, last = restored_steps(tmp_path)
    assert min(before) > 10 >= last, "only the last one was deep enough"
    assert len(events(tmp_path, "good")) > 8, "and the newest three had left it behind long since"
    assert result.step > 28


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("kind", ["steps", "warm"])
def test_a_program_that_has_loaded_its_own_snapshot_is_warned(kind, framework, tmp_path):
    """The snapshot is newer than the checkpoint. A warm optimizer at each start is no snapshot."""

    def run(*, snapshot: bool) -> list[int]:
        """A start that has trained up to step 19 by itself, or one that is killed at step 18."""
        first = 19 if snapshot or kind == "warm" else 0
        loop = loop_of(framework, Faults(), rules())
        for number in range(first):
            loop.step(None, number)
        with Healer(rules(), state=loop.state, store=tmp_path, checkpoints=EVERY_5) as healer:
            for number in healer.steps(20):
                if number == 18 and not snapshot:
                    raise Crash
                loop.step(healer, number)
                healer.after_step()
        return loop.faults.order[first:]

    with pytest.raises(Crash):
        run(snapshot=False)
    assert run(snapshot=True) == [18, 19]
    assert len(events(tmp_path, "problem")) == (kind != "warm")


def train_with_best(store: Path | None, *, last: int | None = None) -> list[int]:
    """Trains with a dictionary that gets its first entry at step 22; the bad step is 23.

    Returns the length of the dictionary at each step. The run breaks off at the step `last`.
    """
    loop = loop_of("torch", Faults(once=[23]))
    best: dict[str, Any] = {}
    loop.state["best"] = best
    lengths: list[int] = []

    def before(healer: Healer, number: int) -> None:
        lengths.append(len(best))
        if number == 22:
            best["bias"] = loop.first.bias.detach().clone()
        if last is not None:
            broken_at(last)(healer, number)

    ending = nullcontext() if last is None else pytest.raises(RuntimeError, match="power")
    with ending:
        train(loop, rules(), range(40), store=store, before=before)
    return lengths


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_rollback_to_before_its_first_entry_empties_a_dictionary_of_the_state(store, tmp_path):
    lengths = train_with_best(tmp_path if store == "disk" else None)
    assert lengths[22:24] == [0, 1]
    assert 0 in lengths[24:]


def test_a_restart_fills_a_dictionary_of_the_state(tmp_path):
    train_with_best(tmp_path, last=30)
    lengths = train_with_best(tmp_path)
    assert lengths[0] == 1
