"""A power failure at any moment: the run resumes from its newest checkpoint, and ends the same."""

import random
from pathlib import Path
from typing import Any

import pytest

from healcore.torch.store import DCPStore
from tests.healer.training_loops import Faults, loop_of, rules, train
from tests.runtime.store.power_failures import Recorder

STORE = Path("runs", "seed-0", "store")
"""The store below the directory that is there before the run: every part of this path is new."""


def run(base: Path, batches: int) -> dict[str, Any]:
    """A run over some batches, of which two are bad, to its end; and the step of its start."""
    loop = loop_of("torch", Faults(always=(13, 31)))
    policy = rules(recoveries=6)
    steps: list[int] = []
    result = train(
        loop,
        policy,
        range(batches),
        before=lambda healer, _: steps.append(healer.step),
        store=base / STORE,
        console=False,
    )
    return {
        "weights": [each.tobytes() for each in loop.weights()],
        "rollbacks": result.rollbacks,
        "first step": steps[0] if steps else result.step,
    }


def resumes_at(recorder: Recorder, look: int, folder: Path) -> int:
    """Step of the checkpoint from which a run resumes that was killed after this look."""
    recorder.restore(look, folder, model="none")
    saves = DCPStore(folder / STORE).checkpoints()
    return max(each.step for each in saves if each.status != "abandoned" and each.finite)


@pytest.mark.parametrize(
    ("batches", "states"),
    [pytest.param(8, 2, id="short"), pytest.param(40, 30, id="long", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("model", ["strict", "journal"])
def test_after_a_power_failure_the_run_ends_the_same(model, batches, states, tmp_path):
    base = tmp_path / "undisturbed"
    base.mkdir()
    recorder = Recorder(base)
    with recorder.recording():
        end = run(base, batches)
    assert end["rollbacks"] == (2 if batches > 31 else 0)
    chance = random.Random(f"{model}/{batches}")
    for state in range(states):
        look = chance.randrange(len(recorder.looks)) if state else len(recorder.looks) - 1
        failed = tmp_path / f"{state}"
        # Half of the states have nothing that was not synced.
        recorder.restore(look, failed, model=model, seed=state if state % 2 else None)
        committed = recorder.last_commit(look)
        least = 0
        if committed is not None:  # a rollback since then may lead further back
            looks = range(committed, look + 1)
            least = min(resumes_at(recorder, each, tmp_path / f"{state}.{each}") for each in looks)
        again = run(failed, batches)
        assert again["first step"] >= least, f"look {look}, state {state}"
        assert again["weights"] == end["weights"], f"look {look}, state {state}"
        assert again["rollbacks"] == end["rollbacks"], f"look {look}, state {state}"
