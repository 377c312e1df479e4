"""The batches of the last steps, which a checkpoint holds: compared with a dictionary."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.data import BatchId
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.journal import Journal

KEPT = 20
"""Number of the newest steps whose batches are kept."""
ACTIONS = st.sampled_from(["read on", "begin an epoch", "skip batches", "read nothing"])
"""What a step does."""


def read(journal: Journal, step: int, batches: list[BatchId], *, kept: int) -> None:
    """Adds a step that has read some batches."""
    journal.add(StepResult(step, [], tuple(batches)), kept=kept)


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


@given(st.lists(st.tuples(ACTIONS, st.integers(1, 3)), max_size=60))
def test_the_batches_are_those_of_a_dictionary(actions):
    state, expected = Journal(), Recorded()
    for action, count in actions:
        step = expected.step
        read(state, step, expected.read(action, count), kept=KEPT)

    for first in range(max(0, expected.step - KEPT), expected.step):
        assert state.batches_of([first]) == expected.batches[first]
        if first >= state.loader_start:
            newest = expected.step - 1
            rest = [expected.batches[step] for step in range(first, expected.step)]
            assert state.batches_between(first, newest) == list(chain.from_iterable(rest))


def test_batches_of_an_earlier_loader_are_left_out():
    state = Journal()
    read(state, 0, [BatchId(0, 0)], kept=KEPT)
    read(state, 1, [BatchId(0, 0)], kept=KEPT)
    state.loader_start = 1
    assert state.batches_between(0, 1) == [BatchId(0, 0)]
