"""The batches of the last steps, which a checkpoint holds: compared with a dictionary."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.data import BatchId
from healcore.runtime.run.monitor_state import MonitorState

KEPT = 20
"""Number of the newest steps whose batches are kept."""
ACTIONS = st.sampled_from(["read on", "begin an epoch", "skip batches", "read nothing", "rollback"])
"""What a step does, or a rollback by some steps."""


class Recorded:
    """The oracle: a run that keeps the batches of each step in a dictionary."""

    def __init__(self) -> None:
        self.batches: dict[int, list[BatchId]] = {}
        self.step = 0
        self._next = BatchId(epoch=0, index=0)

    def read(self, action: str, count: int) -> list[BatchId]:
        """The batches of the next step."""
        epoch, index = self._next
        if action == "begin an epoch":
            epoch, index = epoch + 1, 0
        if action == "skip batches":
            index += count
        if action == "read nothing":
            count = 0
        batches = [BatchId(epoch, index + place) for place in range(count)]
        self._next = BatchId(epoch, index + count)
        self.batches[self.step] = batches
        self.step += 1
        return batches

    def roll_back(self, steps: int) -> None:
        self.step = max(0, self.step - steps)
        self.batches = {step: ids for step, ids in self.batches.items() if step < self.step}


@given(st.lists(st.tuples(ACTIONS, st.integers(1, 3)), max_size=60))
def test_the_batches_are_those_of_a_dictionary(actions):
    state, expected = MonitorState(), Recorded()
    furthest = 0  # a rollback does not bring back what was dropped before it
    for action, count in actions:
        if action == "rollback":
            expected.roll_back(count)
            state.on_rollback(expected.step)
        else:
            step = expected.step
            state.add_batches(step, expected.read(action, count), kept=KEPT)
            furthest = max(furthest, expected.step)

    for first in range(max(0, furthest - KEPT), expected.step):
        assert state.batches_of([first]) == expected.batches[first]
        if first >= state.loader_start:
            newest = expected.step - 1
            rest = [expected.batches[step] for step in range(first, expected.step)]
            assert state.batches_between(first, newest) == list(chain.from_iterable(rest))


def test_steps_that_read_on_are_one_entry():
    state = MonitorState()
    for step in range(1000):
        state.add_batches(step, [BatchId(0, 2 * step), BatchId(0, 2 * step + 1)], kept=10_000)
    assert len(state.batches) == 1
    assert state.batches_of([999]) == [BatchId(0, 1998), BatchId(0, 1999)]


def test_batches_of_an_earlier_loader_are_left_out():
    state = MonitorState()
    state.add_batches(0, [BatchId(0, 0)], kept=KEPT)
    state.add_batches(1, [BatchId(0, 0)], kept=KEPT)
    state.loader_start = 1
    assert state.batches_between(0, 1) == [BatchId(0, 0)]
