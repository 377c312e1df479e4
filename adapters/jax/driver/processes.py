"""`Processes`: the processes of a run, which exchange small items and vote on an early end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from healcore.runtime.store.ranks import Alone, Ranks

if TYPE_CHECKING:
    from healcore.jax.store.vote_marks import VoteMarks


class Processes:
    """Connects the processes of a run, and lets them vote. A run may have a single process.

    A process that has received a signal to end may not end alone: the other processes would wait
    for it in the next collective. So they vote after the same dispatch.
    """

    def __init__(self) -> None:
        self._ranks: Ranks | None = None
        self._marks: VoteMarks | None = None
        """The votes, or None before `ranks` and for one process."""

    def ranks(self) -> Ranks:
        """The exchange between the processes, or `Alone` for one process.

        All processes make the first call together, at the same position in the program, because it
        makes numbered keys for the exchange.
        """
        if self._ranks is None:
            self._ranks = Alone()
            if jax.process_count() > 1:
                from healcore.jax.store.coordination import CoordinatedRanks
                from healcore.jax.store.vote_marks import VoteMarks

                self._ranks, self._marks = CoordinatedRanks(), VoteMarks()
        return self._ranks

    def begin_dispatch(self) -> Callable[[], bool]:
        """Counts a dispatch.

        Returns:
            A function that returns whether the processes vote after this dispatch. Always False for
            a run of one process.
        """
        if self._marks is None:
            return _no_vote
        return self._marks.begin_dispatch()

    def request_vote(self) -> None:
        """Requests a vote after one of the next dispatches, the same one in all processes."""
        assert self._marks is not None, "only called with several processes"
        self._marks.request()

    def close(self) -> None:
        """Ends the thread of the votes."""
        if self._marks is not None:
            self._marks.close()


def _no_vote() -> bool:
    """False, because one process ends without a vote."""
    return False
