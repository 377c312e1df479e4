"""Loaders that cannot be rewound, that raise, or that report wrong positions."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler

from healcore.runtime.data import BatchId, Cursor, DataError
from tests.runtime.data.loaders import (
    BATCHES,
    FORWARD,
    REWINDING,
    SIZE,
    HiddenOrder,
    OwnOrder,
    Shuffled,
    Squares,
    Stream,
    accelerated,
    over,
    plain,
    seeded,
    stateful,
    take,
)


@over(FORWARD)
def test_a_rewind_is_refused_and_moves_nothing(kind):
    cursor = Cursor(kind.make(), epochs=kind.epochs)
    start = cursor.position()
    handed = take(cursor, 1)
    assert cursor.obstacle
    assert cursor.seek(start)
    handed += take(cursor)
    assert handed == take(Cursor(kind.make(), epochs=kind.epochs))
    assert cursor.seek(start)
    assert take(cursor) == []


@pytest.mark.parametrize("length", [4, 5])
def test_a_limited_iterator_continues_in_the_next_epoch(length):
    """As in Lightning, which reads `limit_train_batches` of a stream in each epoch."""
    cursor = Cursor(iter(range(length)), epochs=None)
    cursor.limit = lambda epoch: 2
    read = [cursor.next() for _ in range(length)]
    assert read == [(i, BatchId(i // 2, i % 2)) for i in range(length)]
    with pytest.raises(StopIteration):
        cursor.next()


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(lambda: DataLoader(Stream()), "StatefulDataLoader", id="stream"),
        pytest.param(
            lambda: accelerated(dispatch_batches=True),
            "does not record the position of this rank",
            id="dispatch_batches",
        ),
        pytest.param(
            lambda: accelerated(Stream(), dispatch_batches=False),
            "map-style dataset",
            id="stream in accelerate",
        ),
        pytest.param(
            lambda: stateful(sampler=RandomSampler(range(11))),
            "does not record the order",
            id="sampler without its order",
        ),
        pytest.param(
            lambda: stateful(sampler=OwnOrder(seeded())),
            "does not record the order of tests.runtime.data.loaders.OwnOrder",
            id="sampler with a generator",
        ),
        pytest.param(
            lambda: stateful(num_workers=2, in_order=False),
            "the order of in_order=False",
            id="workers out of order",
        ),
    ],
)
def test_why_not_names_what_to_pass(make, reason):
    assert reason in Cursor(make()).obstacle


@over([*FORWARD, *REWINDING[::4]])
def test_a_seek_reads_to_the_position_of_another_loader(kind):
    """To the position of another kind of loader; batches left out by then do not count."""
    everything = take(Cursor(kind.make(), epochs=kind.epochs))
    earlier = Cursor(range(len(everything) // kind.epochs), epochs=kind.epochs)
    last = everything[-1][0]
    take(earlier, len(everything) - 1)

    cursor = Cursor(kind.make(), epochs=kind.epochs)
    cursor.skipped_batch_ids.add(last)
    obstacle = cursor.seek(earlier.position(), reads_forward=True)
    assert (obstacle == "") == (cursor._reader.kind == "sequence")
    assert take(cursor) == []
    assert cursor.passed_over == [last]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: DataLoader(Stream()), "cannot be rewound"),
        (lambda: plain(sampler=HiddenOrder()), "the samplers do not give the same order again"),
    ],
)
def test_a_seek_promises_no_order_that_is_not_checked(make, says):
    earlier = Cursor(make(), epochs=2)
    take(earlier, BATCHES + 2)
    cursor = Cursor(make(), epochs=2)
    assert says in cursor.seek(earlier.position(), reads_forward=True)
    assert cursor.next_id == earlier.next_id


def test_a_seek_forward_stays_at_an_earlier_position():
    longer = Cursor(range(9), epochs=3)
    take(longer, 9 + 6)
    target = longer.position()
    cursor = Cursor(plain(), epochs=3)
    assert cursor.seek(target, reads_forward=True)
    assert take(cursor, 1)[0][0] == BatchId(2, 0)  # epoch 1 has fewer batches
    assert cursor.seek(target, reads_forward=True)
    assert take(cursor, 1)[0][0] == BatchId(2, 1)
    with pytest.raises(DataError, match="a position is a result"):
        cursor.seek({"epoch": 1})


def test_positions_of_another_kind_of_loader_are_refused():
    elsewhere = Cursor(Shuffled())
    take(elsewhere, 2)
    cursor = Cursor(stateful())
    assert "the run has another loader now" in cursor.seek(elsewhere.position())
    assert not cursor.seek(cursor.position())
    assert not cursor.obstacle
    assert len(take(cursor)) == BATCHES


class OwnGenerator(Sampler):
    """Draws from a generator that nobody can find."""

    drawing = (torch.Generator().manual_seed(1),)

    def __iter__(self):
        return iter(torch.randperm(11, generator=self.drawing[0]).tolist())

    def __len__(self) -> int:
        return 11


def test_an_order_that_is_not_drawn_again():
    cursor = Cursor(DataLoader(Squares(), batch_size=3, sampler=OwnGenerator()))
    take(cursor, 2)
    position = cursor.position()
    assert take(cursor, 1)[0][0] == BatchId(0, 2)
    assert "generator" in cursor.seek(position)


class DrawsEachItem(OwnGenerator):
    """As a sampler of few-shot episodes."""

    def __iter__(self):
        return (int(torch.randint(11, ())) for _ in range(11))


def test_a_sampler_that_draws_at_each_item_continues_with_the_next_draw():
    torch.manual_seed(0)
    cursor = Cursor(DataLoader(Squares(), batch_size=3, sampler=DrawsEachItem()))
    take(cursor, 2)
    position = cursor.position()
    state = torch.get_rng_state()
    rest = take(cursor)
    assert not cursor.seek(position)
    torch.set_rng_state(state)
    assert take(cursor) == rest


def test_settings_of_a_loader_that_change_between_epochs():
    loader = DataLoader(Squares(), batch_size=SIZE)
    cursor = Cursor(loader, epochs=2)
    take(cursor, BATCHES)
    loader.collate_fn = sum
    assert take(cursor, 1) == [(BatchId(1, 0), 5)]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_comes_through_with_the_name_of_its_batch(workers):
    loader = DataLoader(Squares(bad=4), batch_size=SIZE, num_workers=workers)
    cursor = Cursor(loader)
    take(cursor, 1)
    with pytest.raises(OSError, match="example 4 is not there") as caught:
        cursor.next()
    assert "batch 1 of epoch 0 (rows 3, 4, 5)" in caught.value.__notes__[0]
    # Torch's loaders go on behind it: the names still fit.
    assert take(cursor, 1) == [(BatchId(0, 2), [36, 49, 64])]
    cursor = Cursor(loader)
    cursor.skipped_batch_ids.add(BatchId(0, 1))
    assert [which.index for which, _ in take(cursor)] == [0, 2, 3]
    assert cursor.passed_over == [BatchId(0, 1)]


def dying():
    """Two batches, then an exception, which is the end of a generator."""
    yield from (1, 2)
    raise OSError("gone")


def test_the_end_of_a_generator_by_an_exception_is_not_that_of_the_data():
    cursor = Cursor(dying())
    take(cursor, 2)
    with pytest.raises(OSError, match="gone") as first:
        cursor.next()
    assert cursor.unreadable == BatchId(0, 2)
    with pytest.raises(OSError, match="gone") as again:
        cursor.next()
    assert again.value is first.value
    left_out = Cursor(dying())
    left_out.skipped_batch_ids.add(BatchId(0, 2))
    take(left_out, 2)
    with pytest.raises(OSError, match="gone"):
        left_out.next()


class Numbers:
    at, fails_at, state_fails = 0, -1, False

    def __iter__(self):
        while self.at < 6:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        if self.state_fails:
            raise NotImplementedError("no state in this mode")
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
        if self.fails_at == self.at:
            raise KeyError("shard_7")


def test_a_state_that_cannot_be_taken():
    loader = Numbers()
    loader.state_fails = True
    cursor = Cursor(loader)
    take(cursor, 2)
    position = cursor.position()
    assert "NotImplementedError: no state in this mode" in cursor.obstacle
    assert [batch for _, batch in take(cursor)] == [2, 3, 4, 5]
    later = Cursor(Numbers())
    assert later.seek(position, reads_forward=True)
    assert [batch for _, batch in take(later)] == [2, 3, 4, 5]


def test_a_position_that_the_loader_does_not_take():
    loader = Numbers()
    cursor = Cursor(loader, epochs=2)
    take(cursor, 1)
    position = cursor.position()
    take(cursor, 3)
    loader.fails_at = 1
    assert "does not accept the position: KeyError: 'shard_7'" in cursor.seek(position)
    assert take(cursor, 3) == [((0, 4), 4), ((0, 5), 5), ((1, 0), 0)]


@pytest.mark.parametrize(
    "position", [None, {"version": 99}, Cursor([1]).position() | {"state": b"garbage"}]
)
def test_a_value_that_is_no_position(position):
    cursor = Cursor([1, 2, 3])
    take(cursor, 1)
    with pytest.raises(DataError, match="position"):
        cursor.seek(position)
    assert [batch for _, batch in take(cursor)] == [2, 3]


class Counting:
    """Draws an order of its own in each `__iter__`, from their number."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(5), 5))


def test_each_epoch_of_a_loader_begins_once():
    alone = Counting()
    assert [batch for _, batch in take(Cursor(Counting(), epochs=2))] == [*alone, *alone]
