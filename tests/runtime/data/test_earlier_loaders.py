"""`EarlierLoaders`: what the saved positions say of the loaders of earlier processes."""

from typing import Any

import pytest

from healcore.runtime.data.earlier_loaders import EarlierLoaders
from healcore.runtime.data.positions import BatchId


def position(epoch: int, index: int) -> dict[str, Any]:
    """The part of a saved position that is read here: the next batch."""
    return {"epoch": epoch, "index": index}


def loaded(positions: dict[str, Any], *, count: int = 0, epoch: int = 0, **more: Any):
    earlier = EarlierLoaders()
    assert earlier.load({**positions, "count": count, "epoch": epoch, **more}) == epoch
    return earlier


def test_a_loader_with_a_number_and_without_a_position_has_ended():
    earlier = loaded({"1": position(0, 3)}, count=2)
    assert [earlier.has_ended(number) for number in range(3)] == [True, False, False]


def test_a_loader_has_trained_if_it_has_ended_or_is_after_its_first_batch():
    earlier = loaded({"1": position(0, 0), "2": position(0, 1), "3": position(1, 0)}, count=4)
    assert [earlier.has_trained(number) for number in range(5)] == [True, False, True, True, False]


def test_the_furthest_place_is_the_largest_epoch_and_then_the_largest_index():
    earlier = loaded({"0": position(0, 90), "1": position(1, 2)})
    assert earlier.furthest_place(BatchId(5, 5)) == BatchId(1, 2)
    assert EarlierLoaders().furthest_place(BatchId(5, 5)) == BatchId(5, 5)


def test_the_last_begun_loader_is_the_last_one_that_has_read_a_batch():
    """Loader 2 is of an evaluation that has not begun."""
    positions = {"0": position(0, 4), "1": position(0, 1), "2": position(0, 0)}
    assert loaded(positions, count=3, begun=[0, 1, 2]).last_begun == 1
    assert loaded(positions, count=3).last_begun is None


def test_a_shorter_pass_over_an_epoch_does_not_forget_its_later_loaders():
    earlier = EarlierLoaders()
    earlier.note_begun(1, [3, 4])
    earlier.note_begun(1, [3])
    assert earlier.begun == {1: [3, 4]}


def test_loaders_that_the_program_does_not_make_again_are_forgotten():
    earlier = loaded({"0": position(1, 0), "10": position(1, 2)}, count=11)
    earlier.forget_before(2)
    assert [*earlier.positions] == ["10"]


@pytest.mark.parametrize(
    ("positions", "epoch", "next_number", "number"),
    [
        pytest.param({}, 2, 0, 0, id="no positions: the next number"),
        pytest.param({"2": (2, 3)}, 2, 0, 2, id="a loader for each epoch: 0 and 1 are passed over"),
        pytest.param({"1": (2, 3), "2": (2, 5)}, 2, 0, 2, id="the one that stands furthest"),
        pytest.param({"0": (2, 3), "2": (2, 5)}, 2, 0, 0, id="the next number has read batches"),
        pytest.param({"0": (2, 0), "2": (2, 5)}, 2, 0, 2, id="the next number has read none"),
        pytest.param({"2": (2, 3)}, 2, 3, 3, id="a number is not used again"),
        pytest.param({"2": (5, 3)}, 2, 0, 0, id="a loader of a later epoch"),
        pytest.param({"1": (3, 0)}, 2, 0, 1, id="the end of the epoch is in it"),
        pytest.param({"1": (1, 0)}, 2, 0, 0, id="the end of the epoch before is not"),
    ],
)
def test_a_loader_has_the_number_that_it_had_in_its_epoch(positions, epoch, next_number, number):
    saved = {key: position(*place) for key, place in positions.items()}
    assert loaded(saved).number_in(epoch, next_number) == number
