"""`LoaderNumbers`: by which number a restarted program finds its loaders again."""

from typing import Any

from healcore.runtime.data.earlier_loaders import EarlierLoaders
from healcore.runtime.data.epoch_loop import EpochLoop
from healcore.runtime.data.loader_numbers import LoaderNumbers

READ = {"epoch": 2, "index": 3}
"""A position after some batches of epoch 2."""
NEW = {"epoch": 0, "index": 0}
"""A position before the first batch."""


def restarted(positions: dict[str, Any] | None = None, **more: Any) -> LoaderNumbers:
    """The numbers of a process that has resumed from these positions."""
    earlier = EarlierLoaders()
    earlier.load({**(positions or {}), **more})
    return LoaderNumbers(earlier, EpochLoop())


def use(numbers: LoaderNumbers, epoch: int | None = None) -> int:
    """The number that a new loader gets."""
    number = numbers.of_new(epoch)
    numbers.use(number, epoch)
    return number


def test_loaders_are_numbered_in_the_order_of_their_first_use():
    numbers = restarted()
    assert [use(numbers) for _ in range(3)] == [0, 1, 2]


def test_a_program_with_a_loader_for_each_epoch_passes_over_the_epochs_before_the_restart():
    numbers = restarted({"2": READ}, count=3, epoch=2)
    assert [use(numbers, epoch) for epoch in (2, 3, 4)] == [2, 3, 4]


def test_the_loaders_of_a_resumed_epoch_get_the_numbers_of_their_places():
    """In epoch 2, the loop had begun loader 5, and then loader 4 again."""
    numbers = restarted({"4": READ, "5": READ}, count=6, epoch=2, begun=[5, 4])
    assert [use(numbers, 2) for _ in range(3)] == [5, 4, 6]
    assert numbers.begun_in(2) == [5, 4, 6]
    assert numbers.begun_in(1) is None


def test_the_checkpoint_was_saved_in_the_second_loader_of_the_epoch():
    numbers = restarted({"4": READ, "5": READ}, count=6, epoch=2, begun=[4, 5])
    use(numbers, 2)
    assert not numbers.has_begun_last
    use(numbers, 2)
    assert numbers.has_begun_last


def test_a_checkpoint_that_names_no_loader_does_not_wait_for_one():
    assert restarted({"0": READ}, count=1).has_begun_last


def test_a_number_is_never_lowered():
    numbers = restarted()
    numbers.count_from(3)
    numbers.count_from(1)
    assert use(numbers) == 3


def test_a_completed_run_passes_over_the_loaders_it_has_trained_with():
    numbers = restarted({"0": READ, "1": READ, "2": NEW}, count=3)
    numbers.pass_over_completed()
    assert numbers.next == 2


def test_after_a_return_loaders_are_numbered_as_after_a_restart():
    numbers = restarted()
    for epoch in range(4):
        use(numbers, epoch)
    numbers.return_to({"1": {"epoch": 1, "index": 2}, "count": 2, "epoch": 1})
    assert numbers.next == 2


def test_recent_loaders_are_those_of_this_epoch_and_of_the_epoch_before():
    numbers = restarted()
    assert numbers.recent() == set()
    for epoch in range(3):
        use(numbers, epoch)
    assert numbers.recent() == {1, 2}
