"""The data cursor: hands out batches under lasting names, and goes back where the loader can."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

from healcore.runtime.data import position as positions
from healcore.runtime.data.errors import DataError, UnusableLoader
from healcore.runtime.data.passes import Passes
from healcore.runtime.data.position import BatchId

Batch = TypeVar("Batch", covariant=True)


class Indexed(Protocol[Batch]):
    """What is iterated over by index, as a torch Dataset is."""

    def __getitem__(self, index: int, /) -> Batch:
        """The batch at an index; IndexError behind the last one."""
        ...


Loader = Iterable[Batch] | Indexed[Batch]


class Cursor:
    """Goes through a loader, epoch after epoch.

    Nothing is read ahead: when a batch has been handed out, the loader stands right behind it.

    Beginning a pass may draw random numbers (torch loaders do), and `position`, `rewind` and `next`
    may begin one. So take the position first and the random state after it, and put them back in
    that order too.

    Args:
        loader: anything that can be iterated over.
        epochs: how many passes; None for no end. A loader that is an iterator has one pass.
        trust: also take positions of a loader whose state has no plain form, and put back those
            that were pickled. Reading a pickle runs whatever code its writer put there.

    Raises:
        UnusableLoader: it cannot be iterated over, or not that often.
        DataError: `epochs` is no number of epochs.
    """

    def __init__(self, loader: Loader[Any], *, epochs: int | None = 1, trust: bool = False) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise UnusableLoader(
                f"a loader is something to iterate over, not {loader!r:.80}: "
                "pass a DataLoader, a dataset of batches or a list"
            )
        self._trust = trust
        self._passes = Passes(loader, trust=trust)
        self._left_out: frozenset[BatchId] = frozenset()
        self._skipped: list[BatchId] = []
        self._refused: str | None = None
        self._until: int | None = 0
        self.extend(epochs)

    def extend(self, epochs: int | None = 1) -> None:
        """Allows further passes, for loops that have `for epoch in ...` outside.

        After a rewind into an earlier epoch `next` finishes that one first. After a resume in a
        later one it ends at once until the loop outside has come as far.

        Args:
            epochs: how many; None for no end.

        Raises:
            UnusableLoader: an iterator is to give several.
            DataError: not a whole number >= 1.
        """
        if epochs is not None and (type(epochs) is not int or epochs < 1):
            raise DataError(f"epochs is a whole number >= 1, or None for no end, not {epochs!r}")
        if self._passes.one_pass and epochs is not None and epochs > 1:
            raise UnusableLoader(
                f"{self._passes.name} is an iterator and gives one pass, not {epochs}: pass what "
                "it was made from, or epochs=1"
            )
        if epochs is None or self._until is None:
            self._until = None
        else:
            self._passes.asked_for = self._until
            self._until += epochs

    @property
    def can_rewind(self) -> bool:
        """Whether the loader can be put back."""
        return self._passes.source.why_not is None

    @property
    def why_not(self) -> str | None:
        """Why it cannot be put back, or why the last `rewind` was refused."""
        return self._passes.source.why_not or self._refused

    def next(self) -> tuple[Any, BatchId]:
        """The next batch that is not left out, and its name.

        What the loader raises comes through, with the batch's name as a note; that batch counts as
        read, and calling again goes on behind it if the loader does. For a batch that is to be left
        out nothing is raised.

        Raises:
            StopIteration: the epochs are over.
            EmptyLoader: an epoch without any batch.
        """
        while not self._passes.over and (self._until is None or self._passes.epoch < self._until):
            self._passes.begun()  # what iter() raises is of no batch
            which = self._passes.place
            left_out = which in self._left_out
            try:
                batch = self._passes.read()
            except StopIteration:
                continue
            except Exception as error:
                if not left_out or isinstance(error, DataError):
                    raise
            else:
                if not left_out:
                    return batch, which
            self._skipped.append(which)
        raise StopIteration

    def abandon(self) -> None:
        """A loop has broken off: what is left of the epoch is not handed out."""
        self._passes.abandon()

    def position(self) -> dict[str, Any]:
        """The place right after the batch handed out last, for `rewind` and `fast_forward`.

        A copy, of Python values that any checkpoint can hold. A loader whose state cannot be taken
        is from then on one that cannot rewind.
        """
        try:
            return self._encoded()
        except Exception as error:  # a user's object: anything at all
            self._passes.give_up(error)
            return self._encoded()

    def rewind(self, position: Mapping[str, Any]) -> bool:
        """Goes to a position, backwards or forwards, also into another epoch.

        Batches have the names they had before, and those left out since stay left out.

        Args:
            position: from `position`, of this process or an earlier one. It can be used again.

        Returns:
            False if that cannot be done, and `why_not` says why; the cursor is where it was.

        Raises:
            DataError: the loader took the position only half and cannot go back to where it was.
        """
        if not self.can_rewind:
            return False
        try:
            target, left_out = positions.decode(position, trust=self._trust)
        except DataError as error:
            self._refused = str(error)
            return False
        name, kind = self._passes.name, self._passes.source.kind
        if target.kind != kind:
            self._refused = (
                f"the position is of kind {target.kind!r}, and {name} is of kind {kind!r}: the run "
                "has another loader now"
            )
            return False
        here = self.position()
        if not self.can_rewind:
            return False
        try:
            self._passes.go(target)
        except Exception as error:  # a user's object: anything at all
            self._refused = f"{name} does not take the position: {_words(error)}"
            self._return_to(here, error)
            return False
        self._left_out |= left_out
        self._refused = None
        return True

    def fast_forward(self, position: Mapping[str, Any]) -> str:
        """Goes on to a position by reading batches and dropping them, for loaders without a state.

        Args:
            position: from `position`, of this process or an earlier one. Earlier epochs are not
                read again.

        Returns:
            What was done, in words.

        Raises:
            DataError: it is no position.
        """
        target, left_out = positions.decode(position, trust=self._trust)
        self._left_out |= left_out
        goal = BatchId(target.epoch, target.index)
        if goal <= self._passes.place:
            return f"batch {goal.index} of epoch {goal.epoch} is not ahead: nothing was dropped"
        if goal.epoch > self._passes.epoch:
            self._passes.jump(target)
        reached = first = self._passes.index
        try:
            while reached < goal.index:
                self._passes.read()
                reached += 1
        except StopIteration:
            return (
                f"epoch {goal.epoch} has only {reached} batches: goes on behind it, not at batch "
                f"{goal.index}"
            )
        return (
            f"read {reached - first} batches and dropped them, up to batch {goal.index} of epoch "
            f"{goal.epoch}; where the loader shuffles they need not be the ones of before"
        )

    def leave_out(self, ids: Iterable[BatchId]) -> None:
        """Batches not to hand out when they come by; of those that do, `skipped` tells.

        Names behind the end of an epoch are of no batch: a range that reaches over it ends there
        and does not go on in the next epoch.

        Args:
            ids: which; pairs will do.

        Raises:
            DataError: something in it is no batch id.
        """
        self._left_out |= positions.checked_ids(ids)

    def skipped(self) -> list[BatchId]:
        """The batches left out since this was last asked, in order."""
        skipped, self._skipped = self._skipped, []
        return skipped

    def _encoded(self) -> dict[str, Any]:
        return positions.encode(self._passes.here(), self._left_out, trust=self._trust)

    def _return_to(self, here: Any, error: Exception) -> None:
        try:
            self._passes.go(positions.decode(here, trust=self._trust)[0])
        except Exception:
            raise DataError(
                f"{self._passes.name} can go on neither from the position nor from where it was: "
                f"{_words(error)}"
            ) from error


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
