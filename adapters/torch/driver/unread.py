"""Steps that were judged and that nobody has asked for yet, and a word to who never asks."""

from __future__ import annotations

import logging
from typing import Generic, Protocol, TypeVar

from healcore.torch.step_record import Source

_log = logging.getLogger("healcore")

MOST = 64
"""Entries that are kept. A loop may well take several steps between two batches, as in RL."""

_NEVER, _LONG = 100, 1000
"""Steps after which it is asked whether that is meant, if nobody ever asked, and if somebody did.
"""


class _Entry(Protocol):
    @property
    def source(self) -> Source: ...


E = TypeVar("E", bound=_Entry)


class Unread(Generic[E]):
    """The entries since the last `take`: the newest `MOST`, and as many of those with a cause."""

    def __init__(self) -> None:
        self._entries: list[E] = []
        self._count = 0
        self._asked = self._told = False

    def add(self, entry: E) -> None:
        """Takes one more."""
        self._entries.append(entry)
        self._count += 1
        if len(self._entries) >= 3 * MOST:
            # The old ones have arrived long ago: reading them waits for nothing.
            old = [each for each in self._entries[:-MOST] if each.source.read().cause]
            self._entries = old[-MOST:] + self._entries[-MOST:]
        if not self._told and self._count >= (_LONG if self._asked else _NEVER):
            self._told = True
            _log.warning(
                "%d steps, and neither healer.batches(loader) nor healer.after_step() was called: "
                "without one of them nothing is saved and no order of the policy is carried out; "
                "take the batches from `for batch in healer.batches(loader)`, or call "
                "healer.after_step() after each optimizer.step()",
                self._count,
            )

    def take(self) -> list[E]:
        """The entries, oldest first; there are none left then."""
        self._asked, self._count = True, 0
        taken, self._entries = self._entries, []
        return taken

    def clear(self) -> None:
        """Forgets them."""
        self._entries, self._count = [], 0
