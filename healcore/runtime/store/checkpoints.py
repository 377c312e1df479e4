"""The checkpoints of a run: which are restored and which are deleted; errors of stores.

Each start, resume and rollback begins an attempt at a step. A checkpoint is abandoned if a later
attempt began below its step. The record of a checkpoint has the first steps of all attempts so far.
So no checkpoint has to be marked as abandoned, and a crash cannot interrupt the marking.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import index
from typing import Any, Literal, NamedTuple

from healcore.console import first_of
from healcore.core.errors import HealcoreError


class StoreError(HealcoreError, RuntimeError):
    """Base class of all errors of checkpoint stores.

    A store raises it before it changes anything that is live. So the training can continue, or can
    use another checkpoint.
    """

    __module__ = "healcore"


class NoGoodCheckpoint(StoreError, SystemExit):
    """There is no checkpoint to roll back to, or to resume from.

    The run stops then: to continue with weights that are known to be bad would waste the time. At a
    start nothing is changed, so that a damaged directory can be repaired. Uncaught, Python prints
    the message and the process ends with status 1: the cause is on the disk, and not in a line of
    the program that a traceback could show.
    """

    __module__ = "healcore.errors"

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = f"healcore: {self}"


class UnsavableState(StoreError, TypeError):
    """The state holds a value that a checkpoint cannot hold.

    Raised before anything is written, at the first save, so that a long run does not find out later
    that a part of its state was missing.
    """

    __module__ = "healcore.errors"


@dataclass(eq=False, repr=False)
class CheckpointDamaged(StoreError):
    """The bytes of a checkpoint differ from the saved bytes. Use an older checkpoint.

    A disk may return other bytes than were written, and a file may be cut off. Without digests, the
    run would continue with wrong weights. A restore tries the other directories of the run and then
    older checkpoints.
    """

    step: int
    """Step of the checkpoint."""
    path: str
    """Directory of the checkpoint, or "memory"."""
    file: str
    """The file (or array) that differs, relative to `path`."""
    difference: str
    """What is wrong, as the end of a sentence that begins with the file."""
    other_copy: bool = False
    """Whether another copy of the checkpoint was used."""

    def _message(self) -> str:
        return (
            f"the checkpoint of step {self.step} is damaged: {self.file} {self.difference} "
            f"(in {self.path}); nothing was restored: use an older checkpoint"
        )


CheckpointDamaged.__module__ = "healcore.errors"


class CheckpointNotFound(StoreError):
    """The store has no complete checkpoint of the requested step.

    A directory that has the name of a checkpoint but is not complete raises `CheckpointDamaged`.
    """

    __module__ = "healcore.errors"


@dataclass(eq=False, repr=False)
class SaveFailed(StoreError):
    """A checkpoint could not be copied or written. Earlier checkpoints are unchanged.

    The cause is mostly a full disk or a lost file system. The run reports the error and tries again
    at the next save; you lose at most the steps since the newest checkpoint.
    """

    step: int
    """Step of the checkpoint."""
    doing: str
    """What the store was doing, such as "while writing to runs/1"."""
    error: BaseException
    """The exception of the copy or of the system."""
    elsewhere: str = ""
    """Another directory of the run, which has the checkpoint, or an empty string."""

    def _message(self) -> str:
        # torch hides the error of the system behind an error of its own.
        system: BaseException | None = self.error
        while system is not None and not isinstance(system, OSError):
            system = system.__cause__ or system.__context__
        error = f"{type(self.error).__name__}: {self.error}"
        message = f"step {self.step} was not saved, {self.doing}: {error}"
        if system not in (None, self.error):
            message += f" ({system})"
        if self.elsewhere:
            message += f"; {self.elsewhere} has this checkpoint"
        return message


SaveFailed.__module__ = "healcore.errors"


@dataclass(eq=False, repr=False)
class StateMismatch(StoreError):
    """The saved state does not fit the live state.

    The program has changed since the save: another model, another optimizer, or a parameter that is
    added during the run and not yet here. The live state is unchanged.
    """

    step: int | None
    """Step of the checkpoint, or None for a state that is not of a checkpoint."""
    differences: Sequence[str]
    """What differs, a text for each value. The message shows the first of them."""
    where: str = ""
    """Directory of the run, or an empty string."""
    advice: str = ""
    """What to do instead, or an empty string for the general advice."""

    def _message(self) -> str:
        shown = first_of(self.differences, separator="; ")
        which = f"the checkpoint of step {self.step}"
        if self.step is None:
            which = "the saved state"
        advice = self.advice or (
            "Pass the state as it was saved, with all parameters that the run had added by then"
        )
        if self.where:
            which += f" in {self.where}"
            advice += ", or an empty directory to begin a new run"
        return f"{which} does not fit: {shown}. {advice}"


StateMismatch.__module__ = "healcore.errors"

MEMORY = "memory"
"""Place of a copy in messages, where a file has a path."""


# -- the list of checkpoints -----------------------------------------------------------------------

Status = Literal["candidate", "good", "abandoned"]
"""`candidate`: complete, still on probation. `good`: known-good. `abandoned`: saved before a
rollback to an older step, and never restored. Computed, see `AttemptHistory`."""


class CheckpointInfo(NamedTuple):
    """One complete checkpoint, as `CheckpointStore.checkpoints` lists it.

        for saved in store.checkpoints():
            print(saved.step, saved.status, saved.finite)

    The list says what a rollback may restore. To make it, no arrays are read.
    """

    step: int
    """Number of optimizer steps that the saved state has had."""
    status: Status
    """Whether a rollback may restore it."""
    bytes: int
    """Size of its files, or of its copy in memory."""
    created: float
    """Wall-clock seconds since 1970. Clocks jump: order checkpoints by `step`."""
    attempt: int
    """Number of the attempt that saved the checkpoint, from 1."""
    path: str | None
    """Directory of the checkpoint, or None if it is in memory only."""
    nonfinite: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf that `nonfinite_ok` does not name."""

    @property
    def finite(self) -> bool:
        """Whether every array is finite, except arrays that `nonfinite_ok` names."""
        return not self.nonfinite

    @property
    def is_abandoned(self) -> bool:
        """Whether a rollback to an older step has followed. Nothing restores it then."""
        return self.status == "abandoned"

    @property
    def is_usable(self) -> bool:
        """Whether a start or a rollback may restore the checkpoint: finite and not abandoned.

        The steps up to an abandoned checkpoint were undone, and NaN or Inf would stay in the state.
        """
        return self.finite and not self.is_abandoned


BUFFERS_ITEM = "healcore.buffers"
"""Name of the item in a checkpoint with the buffers that are not in `state_dict()`, in torch."""


def disallowed(names: Collection[str], nonfinite_ok: Collection[str]) -> tuple[str, ...]:
    """The names of arrays in which NaN and Inf are not allowed.

    They are allowed in `BUFFERS_ITEM`: it has masks, and memory that nothing has filled yet.

    Args:
        names: names of arrays with NaN or Inf.
        nonfinite_ok: names, or patterns such as `model.*.mask`, of arrays that may have them. A
            mask of an attention, for example, is full of -inf.
    """
    allowed = (*nonfinite_ok, f"{BUFFERS_ITEM}.*")
    return tuple(
        name
        for name in names
        if not any(name == each or fnmatchcase(name, each) for each in allowed)
    )


class Restored(NamedTuple):
    """The result of `restore`, in fresh memory.

    Changing it changes no checkpoint, not even one in memory. `Driver.load` takes `state`.
    """

    state: dict[str, Any]
    """Name in `like` -> a tree, or the argument of `load_state_dict` for an object with
    `state_dict`."""
    record: dict[str, Any] | None
    """The record of the run, or None if the checkpoint has no record."""


class AttemptHistory(NamedTuple):
    """The attempts of a run, and the step up to which its checkpoints are known-good.

        step      0 ──────── 100 ─────── 200 ─── 230   attempt 1 begins at step 0
                              └───────────────────── 250   a rollback: attempt 2 begins at 100

    The checkpoint of step 200 of attempt 1 is abandoned, and the checkpoint of step 100 is not. A
    checkpoint of step 200 that attempt 2 saves is not abandoned either, because no later attempt
    began below it.
    """

    starts: tuple[int, ...] = ()
    """First step of each attempt, oldest first. Attempts are numbered from 1."""
    known_good_up_to: int = -1
    """Finite checkpoints up to this step are known-good."""

    @classmethod
    def of(cls, record: Mapping[str, Any] | None) -> AttemptHistory:
        """The attempts in a record.

        Args:
            record: the record of a run, or None. Another program may have written it.

        Returns:
            The attempts. Empty if the record has no attempts, or no attempts of the right form.
        """
        try:
            found: Any = record
            return cls(tuple(map(index, found["attempts"])), index(found["known_good_up_to"]))
        except (LookupError, TypeError):
            return cls()

    @classmethod
    def newest(cls, histories: Iterable[AttemptHistory]) -> AttemptHistory:
        """The newest of some attempts of a run: those with the most starts.

        Args:
            histories: the attempts in each record.
        """
        return max(histories, key=lambda each: each.recency, default=cls())

    @property
    def recency(self) -> tuple[int, int]:
        """Compares records of one run: the larger, the later the record was written."""
        return len(self.starts), self.known_good_up_to

    def abandons(self, step: int, attempt: int) -> bool:
        """Whether a rollback to an older step has followed the save of a checkpoint.

        Args:
            step: step of the checkpoint.
            attempt: number of the attempt that saved it. Its own start does not abandon it.
        """
        return any(start < step for start in self.starts[attempt:])

    def with_status(self, saves: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """The checkpoints with the statuses that these attempts give them."""
        return [saved._replace(status=self._status(saved)) for saved in saves]

    def _status(self, saved: CheckpointInfo) -> Status:
        """The status of a checkpoint."""
        if self.abandons(saved.step, saved.attempt):
            return "abandoned"
        if saved.finite and saved.step <= self.known_good_up_to:
            return "good"
        return "candidate"


def choose_checkpoints(
    saves: Sequence[CheckpointInfo],
    *,
    onset: int,
    depth: int = 1,
    tried: Sequence[int] = (),
    initial: Sequence[int] = (),
    sound_until_onset: bool = False,
) -> tuple[int, ...]:
    """Chooses the known-good checkpoint of a rollback, or as a last resort an initial one.

    Returns the steps to try: the choice, then older checkpoints in case it is damaged. The
    checkpoint of the onset's step holds the last state before the trouble.

    Args:
        saves: the checkpoints of the run with their statuses, ascending by step.
        onset: step of the incident's first alarm.
        depth: 1 for the newest known-good checkpoint before the onset, 2 for the next older one.
        tried: steps of the checkpoints that were restored for the same trouble. The choice is
            older, because newer known-good checkpoints lead into the same trouble.
        initial: steps of the snapshot that the run began with, and of the checkpoint that this
            process resumed from, which need not be known-good.
        sound_until_onset: whether the state is known to be sound up to the onset, or its weights
            have been compared. Then each finite checkpoint up to the onset can be restored.

    Raises:
        NoGoodCheckpoint: there is no such checkpoint.
    """
    usable = [save for save in saves if save.is_usable and save.step <= onset]
    known_good = {save.step for save in usable if save.status == "good" or sound_until_onset}
    last_resorts = {save.step for save in usable} & set(initial) - known_good
    choices = sorted(known_good, reverse=True) + sorted(last_resorts, reverse=True)
    if not choices:
        raise NoGoodCheckpoint(
            f"no known-good checkpoint from before the onset at step {onset}, and no initial "
            "snapshot: a rollback needs a store with one of them"
        )
    chosen = choices[min(max(depth, 1), max(len(known_good), 1)) - 1]
    if tried and chosen >= min(tried):
        chosen = next((step for step in choices if step < min(tried)), min(choices))
    return tuple(step for step in choices if step <= chosen)


class Keep(NamedTuple):
    """Number of checkpoints of each kind to keep.

        Healer(..., checkpoints=Checkpoints(keep=Keep(good=3, candidates=8, older=True)))

    More checkpoints let a rollback go back further, and take more disk.
    """

    good: int = 3
    """The newest known-good checkpoints. A rollback of depth n needs n of them. At least 1."""
    candidates: int = 3
    """Finite checkpoints newer than the newest known-good one. At least 2: the oldest candidate is
    the next known-good checkpoint, and the newest one loses the fewest steps in a restart."""
    older: bool = False
    """Whether to keep older known-good checkpoints too, one at each doubling of the distance in
    steps, including the first of the run, so that a deep rollback can undo a slow drift. Their
    number is at most log2(steps / steps between two saves)."""

    @property
    def most(self) -> int:
        """Largest number of finite checkpoints, without the checkpoints that `older` keeps."""
        return self.good + self.candidates

    def checked(self) -> Keep:
        """Returns these numbers if they are valid.

        Raises:
            StoreError: a number is not whole or too small.
        """
        for field, least in (("good", 1), ("candidates", 2)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise StoreError(f"keep.{field} is a whole number >= {least}, not {value!r}")
        return self


IN_MEMORY = Keep(good=1, candidates=2)
"""In host memory: one known-good copy, the next candidate, and the newest copy."""


def superfluous(
    saves: Iterable[CheckpointInfo], keep: Keep, *, nonfinite: int = 2, stay: Collection[int] = ()
) -> list[int]:
    """Chooses the checkpoints to delete.

    The newest known-good checkpoint always stays. Without a known-good checkpoint, the oldest
    finite candidate stays, because it is the first that can become known-good. Abandoned
    checkpoints are deleted.

    Args:
        saves: all checkpoints of a store, in any order.
        keep: how many of each kind stay.
        nonfinite: how many of the newest checkpoints with NaN or Inf stay: a run may end in such a
            state.
        stay: steps that stay in any case.

    Returns:
        The steps to delete, ascending.
    """
    ordered = sorted(saves, key=lambda save: save.step)
    good = [s.step for s in ordered if s.status == "good"]
    candidates = [s.step for s in ordered if s.status == "candidate" and s.finite]
    bad = [s.step for s in ordered if s.status == "candidate" and not s.finite]
    while len(candidates) > keep.candidates:
        # The oldest and the newest stay. The one whose neighbours are closest together goes first.
        # Without the oldest, and with saves more frequent than the probation is long, every
        # candidate would be deleted just before it is verified.
        gaps = [after - before for before, after in zip(candidates, candidates[2:], strict=False)]
        del candidates[1 + gaps.index(min(gaps))]
    kept = {*stay, *good[-keep.good :], *candidates, *bad[max(0, len(bad) - nonfinite) :]}
    if keep.older:
        kept |= _one_per_doubling(good, keep.good)
    return [s.step for s in ordered if s.step not in kept]


def _one_per_doubling(good: Sequence[int], newest: int) -> set[int]:
    """One known-good step per doubling of the distance from the last, without the `newest`.

    The oldest step of each doubling stays, because the newest would never reach the next doubling.
    """
    by_doubling: dict[int, int] = {}
    for step in reversed(good[:-newest]):  # the older steps replace the newer ones
        by_doubling[(good[-1] - step).bit_length()] = step
    return set(by_doubling.values())
