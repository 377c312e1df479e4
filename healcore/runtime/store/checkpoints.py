"""The checkpoints of a run: which are restored and which are deleted; errors of stores.

Each start, resume and rollback begins an attempt at a step. A checkpoint is abandoned if a later
attempt began below its step. The record of a checkpoint has the first steps of all attempts so far;
so nothing has to be marked, and a crash leaves nothing half marked. No error of a store changes the
live state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from healcore.console import first_of
from healcore.core.errors import HealcoreError


class StoreError(HealcoreError, RuntimeError):
    """Base class of all errors of checkpoint stores."""


class NoGoodCheckpoint(StoreError):
    """There is no checkpoint to roll back to."""


class UnsavableState(StoreError, TypeError):
    """The state holds a value that a checkpoint cannot hold."""


@dataclass(eq=False, repr=False)
class CheckpointDamaged(StoreError):
    """The bytes of a checkpoint differ from the saved bytes. Use an older checkpoint."""

    step: int
    path: str
    """Directory of the checkpoint, or "memory"."""
    file: str
    """The file (or array) that differs, relative to `path`."""
    difference: str

    def _message(self) -> str:
        return (
            f"the checkpoint of step {self.step} is damaged: {self.file} {self.difference} "
            f"(in {self.path}); nothing was restored: use an older checkpoint"
        )


@dataclass(eq=False, repr=False)
class CheckpointNotFound(StoreError):
    """The store has no complete checkpoint of the requested step."""

    step: int
    existing: Sequence[int]
    location: str

    def _message(self) -> str:
        newest = ", ".join(str(step) for step in self.existing[-5:]) or "none"
        more = "..., " if len(self.existing) > 5 else ""
        return f"{self.location} has no checkpoint of step {self.step}; it has: {more}{newest}"


@dataclass(eq=False, repr=False)
class SaveFailed(StoreError):
    """A checkpoint could not be copied or written. Earlier checkpoints are unchanged."""

    step: int
    doing: str
    error: BaseException
    elsewhere: str = ""
    """Another directory of the run, which has the checkpoint, or an empty string."""

    def _message(self) -> str:
        # torch hides the error of the system behind an error of its own.
        system: BaseException | None = self.error
        while system is not None and not isinstance(system, OSError):
            system = system.__cause__ or system.__context__
        reason = f" ({system})" if system not in (None, self.error) else ""
        error = f"{type(self.error).__name__}: {self.error}"
        but = f"; {self.elsewhere} has this checkpoint" if self.elsewhere else ""
        return f"step {self.step} was not saved, {self.doing}: {error}{reason}{but}"


@dataclass(eq=False, repr=False)
class StateMismatch(StoreError):
    """The saved state does not fit the live state."""

    step: int | None
    differences: Sequence[str]
    where: str = ""
    advice: str = ""
    """What to do instead, or an empty string for the general advice."""

    def _message(self) -> str:
        shown = first_of(self.differences, separator="; ")
        which = "the saved state" if self.step is None else f"the checkpoint of step {self.step}"
        place = f" in {self.where}" if self.where else ""
        otherwise = ", or an empty directory to begin a new run" if self.where else ""
        advice = self.advice or (
            "Pass the state as it was saved, with all parameters that the run had added by then"
        )
        return f"{which}{place} does not fit: {shown}. {advice}{otherwise}"


# -- the list of checkpoints -----------------------------------------------------------------------

Status = Literal["candidate", "good", "abandoned"]
"""`candidate`: complete, still on probation. `good`: known-good. `abandoned`: saved before a
rollback to an older step, and never restored. Computed, see `AttemptHistory`."""


class CheckpointInfo(NamedTuple):
    """One complete checkpoint, as `CheckpointStore.checkpoints` lists it."""

    step: int
    status: Status
    bytes: int
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

    @classmethod
    def of(cls, saved: Any, path: str | None, nonfinite_ok: Collection[str]) -> CheckpointInfo:
        """The entry of a manifest or a copy in memory. `AttemptHistory` sets the status."""
        bad = disallowed(saved.nonfinite, nonfinite_ok)
        numbers = saved.nbytes, saved.created, saved.attempt
        return cls(saved.step, "candidate", *numbers, path, bad)


def disallowed(names: Collection[str], nonfinite_ok: Collection[str]) -> tuple[str, ...]:
    """The names that no pattern of `nonfinite_ok` (`model.*.mask`) matches."""
    allowed = {n for n in names for each in nonfinite_ok if n == each or fnmatchcase(n, each)}
    return tuple(name for name in names if name not in allowed)


class Restored(NamedTuple):
    """The result of `restore`, in fresh memory."""

    state: dict[str, Any]
    """Name in `like` -> a tree, or the argument of `load_state_dict` for an object with
    `state_dict`."""
    record: dict[str, Any] | None
    """The record of the run, or None if the checkpoint has none."""


class CommonState(NamedTuple):
    """The result of `restore_common`, in fresh memory."""

    state: dict[str, Any]
    """As in `Restored`, with the structure of the checkpoint."""
    identities: dict[str, Mapping[str, str]]
    """Name of an optimizer in torch -> part -> saved place of each of its parameters."""


class AttemptHistory(NamedTuple):
    """The attempts of a run, and the step up to which its checkpoints are known-good."""

    starts: tuple[int, ...] = ()
    """First step of each attempt, oldest first. Attempts are numbered from 1."""
    known_good_up_to: int = -1
    """Finite checkpoints up to this step are known-good."""

    @classmethod
    def of(cls, record: Mapping[str, Any] | None) -> AttemptHistory:
        """The attempts in a record. Empty if the record has none."""
        starts, known_good = (record or {}).get("attempts"), (record or {}).get("known_good_up_to")
        if not isinstance(starts, list | tuple) or type(known_good) is not int:
            return cls()
        return cls(tuple(each for each in starts if type(each) is int), known_good)

    @classmethod
    def newest(cls, records: Mapping[int, Mapping[str, Any]]) -> AttemptHistory:
        """The attempts in the newest of some records of the run, by step."""
        found = [(cls.of(record), step) for step, record in records.items()]
        return max(found, key=lambda each: (len(each[0].starts), each[1]), default=(cls(),))[0]

    def abandons(self, step: int, attempt: int) -> bool:
        """Whether an attempt after `attempt` began below `step`."""
        return any(start < step for start in self.starts[attempt:])

    def with_status(self, saves: Iterable[CheckpointInfo]) -> list[CheckpointInfo]:
        """The checkpoints with their statuses."""
        return [saved._replace(status=self._status(saved)) for saved in saves]

    def _status(self, saved: CheckpointInfo) -> Status:
        if self.abandons(saved.step, saved.attempt):
            return "abandoned"
        return "good" if saved.finite and saved.step <= self.known_good_up_to else "candidate"


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

    Returns the steps to try: the choice, then older ones in case it is damaged. The checkpoint of
    the onset's step holds the last state before the trouble.

    Args:
        saves: the checkpoints.
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
    usable = [save for save in saves if save.finite and save.step <= onset]
    known_good = {save.step for save in usable if save.status == "good"}
    candidates = {save.step for save in usable if save.status == "candidate"}
    good = sorted(known_good | candidates if sound_until_onset else known_good, reverse=True)
    choices = good + sorted(candidates & {*initial} - {*good}, reverse=True)
    if not choices:
        listed = [f"{s.step} ({s.status if s.finite else 'not finite'})" for s in saves[-5:]]
        raise NoGoodCheckpoint(
            f"no known-good checkpoint from before the onset at step {onset}, and no initial "
            f"snapshot; there: {', '.join(listed) or 'none, and a rollback needs a store'}"
        )
    older = [step for step in choices if step < min(tried, default=onset + 1)]
    chosen = choices[min(max(depth, 1), len(good) or 1) - 1]
    if tried and chosen >= min(tried):
        chosen = older[0] if older else min(choices)
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
        """Largest number of finite checkpoints, without the `older` ones."""
        return self.good + self.candidates

    def checked(self) -> Keep:
        """Itself. Raises StoreError for an invalid number."""
        for field, least in (("good", 1), ("candidates", 2)):
            value = getattr(self, field)
            if type(value) is not int or value < least:
                raise StoreError(f"keep.{field} is a whole number >= {least}, not {value!r}")
        if type(self.older) is not bool:
            raise StoreError(f"keep.older is True or False, not {self.older!r}")
        return self


IN_MEMORY = Keep(good=1, candidates=2)
"""In host memory: one known-good copy, the next candidate, and the newest copy."""


def superfluous(
    saves: Iterable[CheckpointInfo], keep: Keep, *, nonfinite: int = 2, stay: Collection[int] = ()
) -> list[int]:
    """The steps to delete, ascending; `saves` are all checkpoints of a store, in any order.

    The newest known-good checkpoint always stays. While there is none, the oldest finite candidate
    stays, because it is the first that can become known-good. The newest `nonfinite` checkpoints
    with NaN or Inf stay: a run may end in such a state. The steps in `stay` stay in any case.
    """
    ordered = sorted(saves, key=lambda save: save.step)
    good = [s.step for s in ordered if s.status == "good"]
    candidates = [s.step for s in ordered if s.status == "candidate" and s.finite]
    bad = [s.step for s in ordered if s.status == "candidate" and not s.finite]
    dropped = {
        *({*good[: -keep.good]} - (_one_per_doubling(good, keep.good) if keep.older else set())),
        *(s.step for s in ordered if s.status == "abandoned"),
        *bad[: max(0, len(bad) - nonfinite)],
        *_surplus_candidates(candidates, keep.candidates),
    }
    return sorted(dropped - {*stay})


def _one_per_doubling(good: Sequence[int], newest: int) -> set[int]:
    """One known-good step per doubling of the distance from the last, without the `newest`.

    The oldest step of each doubling stays, because the newest would never reach the next doubling.
    """
    by_doubling = {(good[-1] - step).bit_length(): step for step in reversed(good[:-newest])}
    return set(by_doubling.values())


def _surplus_candidates(steps: Sequence[int], most: int) -> list[int]:
    """The steps to delete so that at most `most` stay, evenly spread.

    The oldest and the newest stay. The step whose neighbours are closest together is deleted first.
    Without the oldest, and with saves more frequent than the probation is long, every candidate
    would be deleted just before it is verified.
    """
    remaining = list(steps)
    surplus = []
    while len(remaining) > most:
        gaps = [remaining[i + 1] - remaining[i - 1] for i in range(1, len(remaining) - 1)]
        surplus.append(remaining.pop(1 + gaps.index(min(gaps))))
    return surplus
