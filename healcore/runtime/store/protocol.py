"""What every checkpoint store can do."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from healcore.runtime.store.background import Background
from healcore.runtime.store.errors import CheckpointDamaged, SaveFailed, StoreError
from healcore.runtime.store.ranks import Alone, Ranks

Status = Literal["candidate", "good", "quarantined"]
"""`candidate`: complete, still on probation. `good`: known-good. `quarantined`: newer than the one
that a run rolled back to, or found damaged; kept for a person to look at, never restored
automatically."""

STATUSES: tuple[str, ...] = get_args(Status)


class Saved(NamedTuple):
    """One complete checkpoint, as `steps` lists it."""

    step: int
    status: Status
    finite: bool
    """Every array in it is finite, except those in `nonfinite_ok`."""
    bytes: int
    created: float
    """Wall-clock seconds since 1970. For people: clocks jump, order by `step`."""
    healing: bool
    """Whether it holds the healing state."""
    path: str | None
    """Its directory; None in memory."""
    nonfinite: tuple[str, ...] = ()
    """Names of arrays with NaN or Inf that `nonfinite_ok` does not name."""


class Restored(NamedTuple):
    """What `restore` returns: fresh memory, nothing shared with the store."""

    state: dict[str, Any]
    """The names of `like`. A tree where a tree was saved; for an object with `state_dict`, what its
    `load_state_dict` takes."""
    healing: dict[str, Any] | None
    """The healing state, None in a checkpoint without one."""


class CheckpointStore(ABC):
    """Checkpoints of one run, by step.

    A store of your own subclasses this and defines the abstract methods. Every other member has the
    default of a store that is one place which outlives the process.

    `verify`, `mark`, `delete` and `steps` may be called from a second thread, at the same time as
    the others from the one that trains.
    """

    root: Path | None = None
    """Directory of the checkpoints, or None."""
    durable: bool = True
    """Whether its checkpoints outlive the process."""
    nonfinite_ok: tuple[str, ...] = ()
    """Patterns of array names where NaN and Inf are allowed. May be changed at any time."""
    protected: frozenset[int] = frozenset()
    """Steps that a store keeps which deletes checkpoints by itself."""
    processes: Ranks = Alone()
    """The ranks that save together; to exchange over while nothing is being written."""
    queue: Background | None = None
    """Queue in which its checkpoints are verified, in order with its saves. None: any other."""

    # -- checkpoints ----------------------------------------------------------------------------

    @abstractmethod
    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Takes a consistent copy and returns; checking and writing go on in the background.

        Changing the state afterwards, in place or by donation, does not change the save. At most
        one copy is under way: while the previous save is still being written, this waits for it. A
        step that exists already is saved again in a directory of its own, and the newer save counts
        once it is complete.

        Args:
            step: number of the optimizer step, >= 0.
            state: name -> tree of arrays and Python values, or an object with `state_dict`.
            healing: JSON-safe, kept as an item of its own.

        Raises:
            UnsavableState: there is something in the state that cannot be saved.
            SaveFailed: the copy could not be taken. `wait` raises failures of the background.
        """

    @abstractmethod
    def steps(self) -> list[Saved]:
        """The complete checkpoints, ascending by step. Reads no array data."""

    @abstractmethod
    def verify(self, step: int) -> Saved:
        """Recomputes every digest.

        Raises:
            CheckpointDamaged: something differs.
            NotThere: there is no such checkpoint.
        """

    @abstractmethod
    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Verifies, then reads.

        Args:
            step: which checkpoint.
            like: the live state (its structure, shapes, dtypes and shardings are used; it is not
                changed), with all of the saved names or some. A value with ``optional = True`` may
                be missing in the checkpoint: the result lacks it then.

        Raises:
            CheckpointDamaged: something differs from what was saved.
            StateMismatch: it was saved from another state.
            NotThere: there is no such checkpoint.
        """

    @abstractmethod
    def mark(self, step: int, status: Status) -> None:
        """Sets the status, atomically.

        Raises:
            NotFinite: `good`, for a checkpoint with NaN or Inf in it.
            NotThere: there is no such checkpoint.
        """

    @abstractmethod
    def delete(self, step: int) -> None:
        """Removes a checkpoint: `steps` does not list it any more, even if the process dies.

        Raises:
            LastGoodKept: it is the last known-good one.
            NotThere: there is no such checkpoint.
        """

    @abstractmethod
    def wait(self) -> None:
        """Returns when the background has nothing left to do.

        Raises:
            SaveFailed: a save failed. Each failure is raised here, one per call, or listed by
                `failures`, once.
        """

    @abstractmethod
    def failures(self) -> list[SaveFailed]:
        """The failures that `wait` has not raised yet, without waiting; each is reported once."""

    @abstractmethod
    def problems(self) -> list[str]:
        """What is in the store and is no checkpoint, as texts for events and for people."""

    # -- tiers ----------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[CheckpointStore, ...]:
        """The places that it consists of, the fastest first: itself, if it is one place."""
        return (self,)

    @property
    def memory(self) -> CheckpointStore | None:
        """The tier that ends with the process, or None."""
        return next((tier for tier in self.tiers if not tier.durable), None)

    @property
    def disk(self) -> CheckpointStore | None:
        """The tier that outlives the process, or None."""
        return next((tier for tier in self.tiers if tier.durable), None)

    def save_on_disk(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """`save` only where it outlives the process; pushes no checkpoint out of memory."""
        self.save(step, state, healing=healing)

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, so that the next would wait for it."""
        return False

    def take_out(self, step: int, *, copied: bool = False) -> None:
        """Keeps a damaged checkpoint from being restored; `copied`: another tier has it too.

        Does nothing if the checkpoint is not listed any more or the disk cannot be written.
        """
        with suppress(StoreError):
            self.mark(step, "quarantined")

    def describe(self, state_bytes: int | None = None) -> str:
        """Where checkpoints are and how much memory they take, as text, for logs."""
        return f"checkpoints in {type(self).__name__}"

    # -- findings, each reported once -----------------------------------------------------------

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints that `steps` does not list any more, and why. The content is not read."""
        return []

    def trouble(self) -> list[StoreError]:
        """Errors of one tier since the last call, where the other tier could be used instead.

        A CheckpointDamaged is a damaged copy, another StoreError a disk that could not be read.
        """
        return []

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves since the last call with NaN or Inf that is not allowed, and the array names."""
        return []

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing.

        Raises:
            UnsavableState: there is something in the state that cannot be saved.
        """
        del state
        return ()


def wanted(saved: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `like` to restore: all but the optional ones that the checkpoint lacks."""
    return {
        name: live
        for name, live in like.items()
        if name in saved or getattr(live, "optional", False) is not True
    }


def checked_step(step: Any) -> int:
    """A step number; StoreError if it is not a whole number >= 0."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or (number := int(step)) < 0:
        raise StoreError(f"step is a whole number >= 0, not {step!r}: pass the optimizer step")
    return number


def checked_status(status: Any) -> Status:
    """A status; StoreError if it is none of the three."""
    if status not in STATUSES:
        raise StoreError(f"status is one of {', '.join(STATUSES)}, not {status!r}")
    return status


def frozen(healing: Mapping[str, Any]) -> bytes:
    """The healing state as bytes, out of reach of later changes; StoreError if not JSON-safe."""
    try:
        return json.dumps(healing, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the healing state must be JSON-safe ({error}): pass what to_dict of the adapter gives"
        ) from None
