"""Rewinding from any place to any other gives the same batches under the same names."""

import pickle
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from healcore.runtime.data import BatchId, Cursor, EmptyLoader, UnusableLoader
from healcore.runtime.data.positions import DataError, positions_of_other_ranks
from healcore.runtime.data.random_states import random_states, set_random_states
from tests.runtime.data.loaders import (
    BATCHES,
    EXAMPLES,
    REWINDING,
    SIZE,
    Kind,
    OwnOrder,
    over,
    plain,
    take,
)


@pytest.mark.slow
@over(REWINDING)
def test_from_the_end_to_every_position_and_in_a_later_process(kind):
    cursor = Cursor(kind.make(), epochs=kind.epochs)
    positions, states = [cursor.position()], [random_states()]
    handed = []
    while batch := take(cursor, 1):
        handed += batch
        positions.append(cursor.position())
        states.append(random_states())
    assert not cursor.obstacle
    last = len(positions) - 1
    # With a worker a rewind starts a process: then only the ends and the middle of an epoch.
    for place in range(last, -1, -1) if "worker" not in kind.name else (last, 6, 4, 0):
        assert not cursor.seek(positions[place])
        set_random_states(states[place])
        assert take(cursor) == handed[place:]
    places = (0, 2, len(handed) // 2, len(handed) - 1)
    for place in places if "worker" not in kind.name else places[2:3]:
        resumed = Cursor(kind.make(), epochs=kind.epochs)
        assert not resumed.seek(pickle.loads(pickle.dumps(positions[place])))
        set_random_states(states[place])
        rest = handed[place:]
        assert take(resumed) == rest


@over(
    [kind for kind in REWINDING if kind.epochs == 3],
    slow=["grain iter", "grain DataLoader"],  # "grain map" reads the same way
)
def test_a_rewind_to_a_position_between_two_epochs_repeats_the_second(kind):
    """After the StopIteration of `next`, where a loop outside is."""
    cursor = Cursor(kind.make(), epochs=1)
    take(cursor)
    between = cursor.position()
    cursor.read_epochs(1, 1)
    second = take(cursor)
    assert [which.epoch for which, _ in second] == [1] * 4
    assert not cursor.seek(between)
    assert take(cursor) == second


def test_a_generator_that_the_program_draws_from_too_continues_at_its_last_draw():
    rng, later = random.Random(5), random.Random(5)
    cursor = Cursor(plain(sampler=OwnOrder(rng)), epochs=2)
    take(cursor, 2)
    rng.random()
    position = cursor.position()
    resumed = Cursor(plain(sampler=OwnOrder(later)), epochs=2)
    assert not resumed.seek(position)
    assert later.random() == rng.random()
    assert take(resumed) == take(cursor)


EPOCHS = 3
IDS = st.tuples(st.integers(0, EPOCHS), st.integers(0, BATCHES + 2))
STEPS = st.one_of(
    st.tuples(st.just("next"), st.integers(1, 5)),
    st.tuples(st.just("mark"), st.none()),
    st.tuples(st.just("rewind"), st.integers(0, 9)),
    st.tuples(st.just("leave out"), st.lists(IDS, max_size=3)),
    st.tuples(st.just("skipped"), st.none()),
)


class Model:
    """The list of all batches and the index of the next one."""

    def __init__(self, row: list[Any]) -> None:
        self.row, self.at = row, 0
        self.skipped_batch_ids: set[BatchId] = set()
        self.skipped: list[BatchId] = []

    def next(self) -> list[Any]:
        while self.at < len(self.row):
            self.at += 1
            which = self.row[self.at - 1][0]
            if which not in self.skipped_batch_ids:
                return [self.row[self.at - 1]]
            self.skipped.append(which)
        return []


def walk(kind: Kind, row: list[Any], steps: list[tuple[str, Any]]) -> None:
    cursor = Cursor(kind.make(), epochs=EPOCHS)
    model = Model(row)
    marks = [(cursor.position(), model.at)]
    for step, value in steps:
        if step == "next":
            for _ in range(value):
                assert take(cursor, 1) == model.next()
        elif step == "mark":
            marks.append((cursor.position(), model.at))
        elif step == "rewind":
            position, model.at = marks[value % len(marks)]
            assert not cursor.seek(position)
        elif step == "leave out":
            cursor.skipped_batch_ids |= {BatchId(*pair) for pair in value}
            model.skipped_batch_ids |= {BatchId(*pair) for pair in value}
        else:
            assert cursor.passed_over == model.skipped
    assert take(cursor) == [batch for batch in iter(model.next, []) for batch in batch]
    assert cursor.passed_over == model.skipped


def random_walks(kind: Kind, count: int, length: int) -> None:
    row = take(Cursor(kind.make(), epochs=EPOCHS))
    assert len(row) == EPOCHS * BATCHES

    @settings(max_examples=count)
    @given(st.lists(STEPS, max_size=length))
    def walks(steps):
        walk(kind, row, steps)

    walks()


@over([k for k in REWINDING if k.name in ("list", "stateful generator", "user's iterator")])
def test_random_rewinds_give_the_same_batches(kind):
    random_walks(kind, 60, 25)


@pytest.mark.stress
@over([kind for kind in REWINDING if kind.epochs == EPOCHS])
def test_every_loader_repeats_its_batches_in_random_walks(kind):
    random_walks(kind, 20 if kind.name.startswith("grain") else 100, 40)  # Grain starts threads


# -- several epochs: within the cursor, in a loop outside, and samplers with `set_epoch` ----------


def distributed(sampler_type: Any = DistributedSampler, loader_type: Any = DataLoader) -> Any:
    sampler = sampler_type(EXAMPLES, num_replicas=1, rank=0)
    return loader_type(EXAMPLES, batch_size=SIZE, sampler=sampler)


STATEFUL: Any = (StatefulDistributedSampler, StatefulDataLoader)


@pytest.mark.parametrize(("types", "by_cursor"), [((), True), ((), False), (STATEFUL, False)])
def test_a_rewind_into_an_earlier_epoch_sets_its_number(by_cursor, types):
    """The cursor numbers the epochs, or an outer loop sets its own numbers."""
    # Three epochs are read.
    loader = distributed(*types)
    cursor = Cursor(loader, epochs=None if by_cursor else 1)
    handed, positions = [], []
    for number in (7, 8, 9):
        if not by_cursor:
            loader.sampler.set_epoch(number)
            cursor.read_epochs(number - 7, 1)
        for _ in range(BATCHES):
            positions.append(cursor.position())
            handed += take(cursor, 1)

    # They have the batches of a loop without healcore.
    alone = distributed()
    for epoch, number in enumerate([0, 1, 2] if by_cursor else [7, 8, 9]):
        alone.sampler.set_epoch(number)
        batches = [batch for which, batch in handed if which.epoch == epoch]
        assert batches == [batch.tolist() for batch in alone]

    # A rewind into each of them returns the same batches, also in a new process.
    for place in (11, 6, 2):
        assert not cursor.seek(positions[place])
        assert take(cursor, 12 - place) == handed[place:]
    resumed = Cursor(distributed(*types), epochs=3)
    assert not resumed.seek(positions[6])
    assert take(resumed) == handed[6:]


@pytest.mark.parametrize(("empty", "epochs"), [([], None), (torch.empty(0, 2), 1)])
def test_an_empty_loader_raises_and_names_its_epoch(empty, epochs):
    with pytest.raises(EmptyLoader, match="gave no batch in epoch 0: is the dataset empty"):
        Cursor(empty, epochs=epochs).next()


def test_an_iterator_has_one_epoch():
    for epochs in (1, None):
        assert len(take(Cursor(iter([1, 2]), epochs=epochs))) == 2
    cursor = Cursor(iter([1, 2]))
    take(cursor)
    cursor.read_epochs(1, 1)  # as a plain loop: nothing more comes
    assert take(cursor) == []
    with pytest.raises(UnusableLoader, match="is an iterator and has one epoch, not 2"):
        Cursor(iter([1, 2]), epochs=2)


def test_an_exhausted_iterator_has_no_batch_in_later_epochs_of_the_program():
    """As in the program without healcore, which continues after its loop."""
    cursor = Cursor(number for number in range(3))
    assert (len(take(cursor)), cursor.is_used_up) == (3, True)
    for epoch in (1, 2):
        cursor.read_epochs(epoch, 1)
        assert take(cursor) == []


# -- a position of another number of ranks: the same global batch, or an error --------------------

ROWS = 96


def loaders(kind: type, ranks: int, batch_size: int) -> list:
    """One of each rank, over the same rows, shuffled."""
    data: Any = list(range(ROWS))
    samplers = [DistributedSampler(data, ranks, rank, seed=7) for rank in range(ranks)]
    return [kind(data, batch_size=batch_size, sampler=each) for each in samplers]


def global_batches(cursors: list[Cursor]) -> list[set[int]]:
    """The rows of all ranks, batch by batch, to the end of the second epoch."""
    found = []
    while True:
        try:
            batches = [cursor.next()[0] for cursor in cursors]
        except StopIteration:
            return found
        found.append({int(row) for batch in batches for row in torch.as_tensor(batch)})


@pytest.mark.parametrize(
    ("kind", "before", "now", "read"),
    [
        pytest.param(DataLoader, (4, 2), (2, 4), 0, id="fewer ranks"),
        pytest.param(DataLoader, (2, 4), (1, 8), 15, id="one rank"),
        pytest.param(StatefulDataLoader, (2, 4), (4, 2), 5, id="more ranks"),
        pytest.param(StatefulDataLoader, (4, 2), (2, 4), 12, id="at the end of an epoch"),
    ],
)
def test_another_number_of_ranks_reads_the_same_global_batches(kind, before, now, read):
    cursors = [Cursor(each, epochs=2) for each in loaders(kind, *before)]
    for _ in range(read):
        _ = [cursor.next() for cursor in cursors]
    position = positions_of_other_ranks({"": cursors[0].position()}, before[0])[""]
    expected = global_batches(cursors)
    assert len(expected) == 24 - read
    others = [Cursor(each, epochs=2) for each in loaders(kind, *now)]
    for cursor in others:
        assert not cursor.seek(position)
    assert global_batches(others) == expected


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        pytest.param(
            range(10),
            range(5),
            r"the loader had 10 batches, and range has 5 batches",
            id="number of batches",
        ),
        pytest.param(
            iter(range(10)),
            iter(range(10)),
            "the loader had an unknown number of batches",
            id="unknown division",
        ),
        pytest.param(
            loaders(DataLoader, 2, 4)[0],
            loaders(DataLoader, 4, 4)[0],
            "the loader had 8 rows of a global batch, and .* has 16 rows of a global batch",
            id="rows of a global batch",
        ),
        pytest.param(
            loaders(DataLoader, 2, 4)[0],
            iter(range(10)),
            "has an unknown number",
            id="unknown number",
        ),
    ],
)
def test_another_division_is_refused(before, now, why):
    cursor = Cursor(before)
    cursor.next()
    position = positions_of_other_ranks({"": cursor.position()}, 2)[""]
    other = Cursor(now)
    with pytest.raises(DataError, match=why) as error:
        other.seek(position)
    assert "saved by 2 ranks" in str(error.value)
    assert "Start the run with 2 ranks" in str(error.value)
    assert "keep (batch size) x (number of ranks)" in str(error.value)
    assert "DistributedSampler" not in str(error.value)
    assert other.next()[1] == (0, 0), "nothing was read"
