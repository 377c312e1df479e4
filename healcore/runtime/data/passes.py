"""One loader, pass after pass: reading it, and putting it elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from healcore.runtime.data.epochs import EpochNumbers
from healcore.runtime.data.errors import EmptyLoader
from healcore.runtime.data.forward import kind_of
from healcore.runtime.data.position import BatchId, Position, frozen, thawed
from healcore.runtime.data.rewinding import Forward, Source, source_of

_EPOCHS_REMEMBERED = 100


class Passes:
    """Knows which batch is next. A pass begins when its first batch or its state is asked for."""

    def __init__(self, loader: Any, *, trust: bool = False) -> None:
        self.trust = trust
        self.name = kind_of(loader)
        self.one_pass = isinstance(loader, Iterator)
        self.over = False
        """The one pass of an iterator is through."""
        self.epoch = 0
        self.index = 0
        self.asked_for = 0
        """The epoch that the user's loop asked for last."""
        self._loader = loader
        self._numbers = EpochNumbers(loader)
        self._current: Iterator[Any] | None = None
        self._first_states: dict[int, str] = {}  # of the last epochs begun
        self._between = False  # no pass now, but there was one
        self._resumed = False  # this pass came from a state

    @functools.cached_property
    def source(self) -> Source:
        """How the loader is put back. Found out when needed: that may begin a pass."""
        return source_of(self._loader)

    @property
    def place(self) -> BatchId:
        """The next batch."""
        return BatchId(self.epoch, self.index)

    def begun(self) -> Iterator[Any]:
        """The pass, begun now if need be."""
        if self._current is None:
            self._numbers.begin(self.epoch, by_user=self.epoch == self.asked_for)
            self._between = self._resumed = False
            if (first := self._first_states.get(self.epoch)) is not None:
                self._current = self.source.resume(thawed(first, trust=self.trust))
            else:
                self._current = self.source.start()
                self._remember_start()
        return self._current

    def read(self) -> Any:
        """The next batch. One that raises is counted too: torch loaders go on behind it.

        Raises:
            StopIteration: the pass is through; a further `read` is of the next epoch.
            EmptyLoader: it had no batch at all.
        """
        which, batches = self.place, self.begun()
        try:
            batch = next(batches)
        except StopIteration:
            self._end()
            raise
        except Exception as error:
            error.add_note(f"healcore: reading batch {which.index} of epoch {which.epoch}")
            self.index += 1
            raise
        self.index += 1
        return batch

    def here(self) -> Position:
        """The place with the state to come back with.

        Raises:
            Exception: whatever the loader raises.
        """
        if self.source.why_not is not None:
            state = None
        elif self._between:
            # Beginning the next pass for its state would read ahead, perhaps behind the last epoch.
            state = self.source.state_between()
        else:
            self.begun()
            state = self.source.state()
        number = self._numbers.number(self.epoch)
        return Position(self.source.kind, self.epoch, self.index, state, number)

    def go(self, target: Position) -> None:
        """Puts the loader there.

        Raises:
            Exception: whatever the loader raises; it may then stand anywhere.
        """
        self._numbers.back_to(target.epoch, target.told_epoch)
        self._leave()
        if target.state is not None:
            self._current = self.source.resume(target.state)
            self._resumed, self._between = True, False
        self.over = False
        self.epoch, self.index = target.epoch, target.index

    def jump(self, target: Position) -> None:
        """To the beginning of an epoch, without a state."""
        self._numbers.back_to(target.epoch, target.told_epoch)
        self._current, self._between = None, False
        self.epoch, self.index = target.epoch, 0

    def abandon(self) -> None:
        """Leaves the rest of a pass; the next one is of the next epoch."""
        if self.index > 0 and not self.one_pass:
            self.epoch, self.index = self.epoch + 1, 0
            # Not between two passes: a loader's own state still leads back into this one.
            self._current, self._between = None, False

    def give_up(self, error: Exception) -> None:
        """A state could not be taken: from now on there is no way back."""
        why = f"the state of {self.name} cannot be taken: {type(error).__name__}: {error}"
        self.source = Forward(self._loader, None, why)
        self._first_states.clear()

    def _remember_start(self) -> None:
        """An epoch begun a second time, after a rewind, must have the order of the first time.

        What the loader shuffles by (a count of its passes, say) need not be in its iterator's
        state, and has gone on since.
        """
        if self.source.whole:
            return
        try:
            self._first_states[self.epoch] = frozen(self.source.state(), trust=self.trust)
        except Exception as error:  # a user's object: anything at all
            self.give_up(error)
        while len(self._first_states) > _EPOCHS_REMEMBERED:
            del self._first_states[min(self._first_states)]

    def _end(self) -> None:
        if self.index == 0 and not self._resumed:
            raise EmptyLoader(self.epoch, self.name)
        if self.one_pass:
            self.over = True
            return
        # A state from between two passes may lead to the end of the first: then begin anew, once.
        if self.index > 0:
            self.epoch += 1
        self.index = 0
        self._leave()

    def _leave(self) -> None:
        self._current, self._between = None, True
