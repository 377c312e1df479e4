"""Several ranks do a window again together when a part of one of them did not fit into memory.

Sizes are the same on all ranks, because each changes them by what all have reported.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from healcore.runtime.microbatches.splitting import BatchSize
from healcore.runtime.microbatches.window import Failure, Synchronization, released
from healcore.runtime.store.ranks import RankFailed, Ranks

NOT_TRIED = "healcore has not tried smaller parts of the batch"


class Overrun(NamedTuple):
    """A part that did not fit into memory."""

    size: BatchSize | None
    """Of its batch."""
    parts: int
    """Into how many its batch was split."""
    sign: str
    """What the exception was known by."""
    line: str
    """The first of the exception."""
    bytes: int | None
    """What could not be allocated, if the exception says it."""
    why_not: str
    """Why there can be no smaller parts; "": there can."""


class _Answer(Protocol):
    """See `healcore.runtime.loop.out_of_memory.OutOfMemory`."""

    def described(self, failure: Failure) -> Overrun | None: ...

    def shrink(self, overrun: Overrun, error: BaseException, rank: str = "") -> None: ...

    def grow(self, size: BatchSize) -> None: ...


class JointRedo:
    """Decides on every rank alike after a part that failed, and after each batch."""

    def __init__(self, answer: _Answer, ranks: Ranks, sync: Synchronization) -> None:
        self._answer = answer
        self._ranks = ranks
        self._sync = sync

    def after_part(self, failure: Failure | None, growing: BatchSize | None) -> bool:
        """Whether all ranks do the window again.

        Args:
            failure: a part that raised; None: the batch's last part is done.
            growing: the batch's size if it is time to try larger parts.

        Raises:
            RunStopped: there is no smaller part; on every rank.
            RankFailed: another rank's batch cannot be split.
        """
        if failure is None:
            return self._decide(None, None, growing)
        overrun = self._answer.described(failure)
        if overrun is None:
            return False
        released(failure.error)  # there has to be a little memory for what follows
        if self._sync.complete() and self._decide(failure.error, overrun, None):
            return True
        why = overrun.why_not or (
            "the other ranks did not come out of their parts, in which they probably wait for this "
            "one: nothing may be exchanged there but what DistributedDataParallel exchanges"
        )
        failure.error.add_note(f"{NOT_TRIED}: {why}")
        return False

    def _decide(
        self, error: BaseException | None, mine: Overrun | None, growing: BatchSize | None
    ) -> bool:
        votes = self._sync.vote(failed=mine is not None, grows=growing is not None)
        if votes is None:
            return False
        failed, grows = votes
        if failed:
            return self._shrink(error, self._ranks.gather(mine))
        self._sync.reduce()
        if grows:
            self._grow(self._ranks.gather(growing))
        return False

    def _shrink(self, error: BaseException | None, found: list[Overrun | None]) -> bool:
        kinds: dict[str, list[tuple[float, int, Overrun]]] = {}
        for rank, each in enumerate(found):
            if each is None:
                continue
            if each.size is None:
                if rank == self._ranks.rank:
                    return False  # its own exception passes
                raise RankFailed(f"rank {rank}: {each.line}; {NOT_TRIED}: {each.why_not}")
            part = each.size.elements / each.parts
            kinds.setdefault(each.size.kind, []).append((part, rank, each))
        for _, kind in sorted(kinds.items()):
            # Half of the smallest that did not fit is below half of the others.
            _, rank, smallest = min(kind)
            ranks = ", ".join(str(each) for _, each, _ in kind)
            cause = error or RankFailed(f"rank {rank}: {smallest.line}")
            self._answer.shrink(smallest, cause, f"rank {ranks}: ")
        return True

    def _grow(self, found: list[BatchSize | None]) -> None:
        """Larger parts of each kind that is ready for it on any rank, by its largest batch."""
        largest: dict[str, BatchSize] = {}
        for each in found:
            if each is not None and each.elements >= largest.get(each.kind, each).elements:
                largest[each.kind] = each
        for _, each in sorted(largest.items()):
            self._answer.grow(each)
