"""The batches of the last steps, which a checkpoint holds: compared with a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.data import BatchId
from healcore.runtime.run.monitor_state import MonitorState

KEPT = 20

# What a step does: read on by some batches, begin an epoch, skip a batch, or read nothing.
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["next", "epoch", "gap", "nothing", "rollback"]), st.integers(1, 3)),
    max_size=60,
)


@given(ACTIONS)
def test_the_batches_are_those_of_a_dictionary(actions):
    state = MonitorState()
    expected: dict[int, list[BatchId]] = {}
    step = epoch = index = 0
    furthest = 0  # a rollback does not bring back what was dropped before it
    for action, count in actions:
        if action == "rollback":
            step = max(0, step - count)
            state.on_rollback(step)
            expected = {each: ids for each, ids in expected.items() if each < step}
            continue
        if action == "epoch":
            epoch += 1
            index = 0
        elif action == "gap":
            index += count
        ids = [BatchId(epoch, index + place) for place in range(count)]
        if action == "nothing":
            ids = []
        index += len(ids)
        state.add_batches(step, ids, kept=KEPT)
        expected[step] = ids
        step += 1
        furthest = max(furthest, step)
    for first in range(max(0, furthest - KEPT), step):
        assert state.batches_of([first]) == expected[first]
        wanted = [batch for each in range(first, step) for batch in expected[each]]
        if first >= state.loader_start:
            assert state.batches_between(first, step - 1) == wanted


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
