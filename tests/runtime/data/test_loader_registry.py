"""The batches that a run reads after a rollback."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from healcore import Checkpoints
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import SKIPS, Faults, loop_of, rules, train


class Forward:
    """Numbers that can only be read once and forwards."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        yield from range(self.count)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_loader_that_cannot_be_rewound_goes_on_forward_and_that_is_logged(framework, tmp_path):
    loop = loop_of(framework, Faults(always=[23]), rules())
    facts = train(loop, rules(), Forward(40), store=tmp_path)
    assert loop.faults.order == list(range(40)), "nothing twice, nothing left out"
    (rollback,) = events(tmp_path, "rollback")
    warned, moved = events(tmp_path, "data")
    assert "continues forward" in warned["outcome"], "before it is needed"
    assert moved["rewound"] is False
    assert "Forward" in moved["outcome"]
    assert facts["step"] == rollback["checkpoint"] + 15


def test_the_policy_sets_how_many_batches_are_left_out(tmp_path):
    """No more than the epoch has: the next one is read from its first batch."""
    for count, batches in ((4, range(23, 28)), (30, range(23, 40))):
        loop, store = loop_of("torch", Faults(once=[23])), tmp_path / str(count)
        train(loop, rules(skip_batches=count), range(40), store=store, epochs=2)
        (left_out,) = events(store, "skipped_batches")
        assert left_out["batches"] == [[0, n] for n in batches]
        assert loop.faults.order[-40:] == list(range(40))
        assert loop.faults.order.count(24) == 2, "read on the way to the rollback, not after it"


def test_a_rollback_into_the_epoch_before(tmp_path):
    from healcore.runtime.healer import Healer

    loop, data = loop_of("torch", Faults(once=[1])), list(range(20))
    loop.faults.seen[1] = -1  # bad in the second epoch only
    with Healer(
        rules(), state=loop.state, store=tmp_path, checkpoints=Checkpoints(every=5)
    ) as healer:
        for _epoch in range(2):
            for number in healer.batches(data):
                loop.step(healer, number)
        assert healer.step == 39
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["checkpoint"] < 20
    (left_out,) = events(tmp_path, "skipped_batches")
    assert left_out["batches"] == [[1, 1]]
    assert loop.faults.order[-19:] == [0, *range(2, 20)]


def test_a_bad_batch_is_named_with_its_rows(tmp_path, caplog):
    """In the events, on the console and in the postmortem."""
    data = DataLoader(range(40), batch_size=None, shuffle=True)  # type: ignore[arg-type]
    loop = loop_of("torch", Faults(always=[23]))
    with caplog.at_level("INFO", "healcore"):
        train(loop, SKIPS, data, store=tmp_path)
    (alarm,), (incident,) = events(tmp_path, "alarm"), events(tmp_path, "incident")
    assert alarm["rows"] == incident["rows"] == [[23]]
    named = f"epoch 0 batch {alarm['batches'][0][1]} (rows 23)"
    assert named in caplog.text
    assert named in postmortems(tmp_path)[-1]["diagnosis"].replace("\n", " ")
