"""The protocol of checkpoint stores, and checks that all stores use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from healcore.runtime.store import checksummed_json
from healcore.runtime.store.background import Background
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.ranks import Alone, Ranks

Status = Literal["candidate", "good", "abandoned"]
"""`candidate`: complete, still on probation. `good`: known-good. `abandoned`: saved before a
rollback to an older step, and never restored. Computed, see `Course`."""


class Saved(NamedTuple):
    """One complete checkpoint, as `steps` lists it."""

    step: int
    status: Status
    finite: bool
    """Whether every array is finite, except arrays that `nonfinite_ok` names."""
    bytes: int
    created: float
    """Wall-clock seconds since 1970. Clocks jump: order checkpoints by `step`."""
    attempt: int
    """Number of the attempt that saved the checkpoint, from 1."""
    path: str | None
    """Directory of the checkpoint, or None if it is in memory."""
    nonfinite: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf that `nonfinite_ok` does not name."""


class Restored(NamedTuple):
    """The result of `restore`, in fresh memory."""

    state: dict[str, Any]
    """Name in `like` -> a tree, or the argument of `load_state_dict` for an object with
    `state_dict`."""
    healing: dict[str, Any] | None
    """The healing state, or None if the checkpoint has none."""


class CheckpointStore(ABC):
    """Checkpoints of one run, by step.

    A store of your own subclasses this class and defines the abstract methods. The defaults of all
    other members fit a store in one place that outlives the process.

    The background may call `verify`, `delete` and `steps` while the thread that trains calls the
    other methods.
    """

    root: Path | None = None
    """Directory of the checkpoints, or None."""
    durable: bool = True
    """Whether its checkpoints outlive the process."""
    nonfinite_ok: tuple[str, ...] = ()
    """Patterns of array names where NaN and Inf are allowed. May be changed at any time."""
    protected: frozenset[int] = frozenset()
    """Steps that the store never deletes by itself."""
    processes: Ranks = Alone()
    """The ranks that save together. Exchange over them only while nothing is being written."""
    queue: Background | None = None
    """Queue of the saves, in which superfluous checkpoints are deleted too, or None without one."""

    # -- checkpoints ----------------------------------------------------------------------------

    @abstractmethod
    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies the state and returns; the copy is checked and written in the background.

        Changing the state afterwards, in place or by donation, does not change the save. The call
        waits while the previous save is still being written. A save of a later attempt replaces
        the older save of its step once the new save is complete.

        Args:
            step: number of the optimizer step, >= 0.
            state: name -> tree of arrays and Python values, or an object with `state_dict`.
            healing: the healing state, JSON-safe. The attempt of the save is the number of items
                in its list `attempts`, or 1 without the list.

        Raises:
            UnsavableState: the state holds something that cannot be saved.
            SaveFailed: the state could not be copied. `wait` raises later failures.
        """

    def accepts(self, why: str) -> bool:
        """Whether a run saves for the reason `why`, as in the event `save`. By default always."""
        del why
        return True

    @abstractmethod
    def steps(self) -> list[Saved]:
        """The complete checkpoints, ascending by step. Reads no arrays."""

    @abstractmethod
    def verify(self, step: int) -> Saved:
        """Recomputes every digest; returns the checkpoint as `steps` lists it.

        Raises:
            CheckpointDamaged: a digest differs.
            CheckpointNotFound: the step has no checkpoint.
        """

    @abstractmethod
    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Verifies a checkpoint, then reads it.

        Args:
            step: step of the checkpoint.
            like: the live state with all or some of the saved names, which is not changed. The
                result has its structure, shapes, dtypes and shardings. The result lacks a value
                with ``optional = True`` that the checkpoint lacks.

        Raises:
            CheckpointDamaged: the content differs from the saved content.
            StateMismatch: the checkpoint was saved from another state.
            CheckpointNotFound: the step has no checkpoint.
        """

    @abstractmethod
    def healings(self) -> dict[int, dict[str, Any]]:
        """The intact healing states by step, also of checkpoints that are damaged elsewhere."""

    @abstractmethod
    def commit(self, step: int, healing: Mapping[str, Any]) -> None:
        """Replaces the healing state of a checkpoint, atomically. The arrays stay.

        Raises:
            CheckpointNotFound: the step has no checkpoint.
            StoreError: the healing state could not be written.
        """

    @abstractmethod
    def delete(self, step: int) -> None:
        """Removes a checkpoint, atomically.

        Raises:
            CheckpointNotFound: the step has no checkpoint.
        """

    @abstractmethod
    def wait(self) -> None:
        """Waits until every save is complete.

        Raises:
            SaveFailed: a save failed. Each call raises one failure. A failure is raised here or
                listed by `failures`, never both.
        """

    @abstractmethod
    def failures(self) -> list[SaveFailed]:
        """The failures since the last call that `wait` has not raised. Does not wait."""

    # -- tiers ----------------------------------------------------------------------------------

    @property
    def tiers(self) -> tuple[CheckpointStore, ...]:
        """The stores that this store consists of, fastest first."""
        return (self,)

    @property
    def memory(self) -> CheckpointStore | None:
        """The tier that is lost when the process ends, or None."""
        return next((tier for tier in self.tiers if not tier.durable), None)

    @property
    def disk(self) -> CheckpointStore | None:
        """The tier that outlives the process, or None."""
        return next((tier for tier in self.tiers if tier.durable), None)

    # -- problems, each reported once -----------------------------------------------------------

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints that are too damaged for `steps` to list. Their content is not read."""
        return []

    def trouble(self) -> list[StoreError]:
        """Errors of one tier since the last call for which the other tier was used instead.

        CheckpointDamaged means a damaged copy; any other StoreError means an unreadable disk.
        """
        return []

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Step and array names of each save since the last call with disallowed NaN or Inf."""
        return []

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing.

        Raises:
            UnsavableState: the state holds something that cannot be saved.
        """
        del state
        return ()


def values_to_restore(saved: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `like`, without optional values that the checkpoint lacks."""
    return {
        name: live
        for name, live in like.items()
        if name in saved or getattr(live, "optional", False) is not True
    }


def checked_step(step: Any) -> int:
    """The step as an int; StoreError if it is not a whole number >= 0."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or (number := int(step)) < 0:
        raise StoreError(f"step is a whole number >= 0, not {step!r}: pass the optimizer step")
    return number


def encode_healing(healing: Mapping[str, Any]) -> bytes:
    """The healing state as JSON bytes with a digest; StoreError if it is not JSON-safe."""
    try:
        return checksummed_json.dumps(healing)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the healing state must be JSON-safe ({error}): pass the adapter's to_dict()"
        ) from None
