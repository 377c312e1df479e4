"""What all stores on disk share: one directory per checkpoint, complete only with its manifest.

    root/
      step-0000000120.5f3a9c21/        a fresh directory for every save
        data/                          what the framework's own writer wrote
        state.json                     structure of the state, Python values
        healing.json                   the healing state, if there is one
        manifest.json                  written last: size and digest of all of the above
        status.json                    candidate, good or quarantined; may change
      .tmp-healcore-<pid>-…/           work in progress: a save, or a checkpoint being deleted

A save happens in a temporary directory that gets its final name when all in it is on disk. Deleting
is the same backwards: the directory loses its name first, in one atomic step, and is emptied then;
the name is the journal, and the next start finishes what a crash has left.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from healcore.runtime.store import (
    committing,
    inspection,
    listing,
    manifest,
    protocol,
    ranks,
    regular,
    retention,
    sweeping,
)
from healcore.runtime.store.background import Background
from healcore.runtime.store.claim import held_by_another
from healcore.runtime.store.committing import Item, Written
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    LastGoodKept,
    NotFinite,
    NotThere,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.listing import Found
from healcore.runtime.store.protocol import Restored, Saved, Status
from healcore.runtime.store.ranks import Alone, Ranks

_CRAFTED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""What reading a structure raises whose digest holds, and which no store can have written."""


class DirectoryStore(ABC):
    """Checkpoints in the directories below one root. A framework adds copying, writing and reading.

    Args:
        root: directory of this run's checkpoints and of nothing else; made if it is not there.
        nonfinite_ok: patterns of array names (`model.*.mask`) where NaN and Inf are meant.
        ranks: the processes that save together, into a directory that all of them see. They call
            every method together, except `steps` and `problems`.

    Raises:
        StoreError: the directory is not there and cannot be made.
    """

    format: str
    """Name of what lies in `data`, for the manifest."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        nonfinite_ok: Collection[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        # Absolute: a program that changes its working directory still means the same place.
        self.root = Path(root).absolute()
        self.nonfinite_ok = tuple(nonfinite_ok)
        """Patterns of array names where NaN and Inf are meant. May be set anew at any time."""
        self._ranks: Ranks = ranks or Alone()
        self._behind = Background(f"healcore-{self.format}")
        # Several ranks exchange while they write and while they verify: in one order, hence in one
        # thread. A rank alone verifies beside the writing: the next save need not wait for that.
        alone = self._ranks.world == 1
        self._proofs = Background(f"healcore-{self.format}-proofs") if alone else self._behind
        self._written: Future[None] | None = None
        self._nonfinite: list[tuple[int, tuple[str, ...]]] = []
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            os.listdir(self.root)
        except OSError as error:
            raise StoreError(
                f"{self.root} cannot be used for checkpoints: {error.strerror}; "
                "pass a directory that can be made and written"
            ) from error
        # In another container a living process looks like one that has gone.
        sweeps = self._ranks.rank == 0 and not held_by_another(self.root)
        self.swept = sweeping.sweep(self.root) if sweeps else []
        """Own leavings of killed processes, removed just now."""

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def _capture(self, state: Mapping[str, Any], *, copy: bool) -> Any:
        """A Snapshot of the state (without `copy`: the state itself in the same form)."""

    @abstractmethod
    def _write(self, captured: Any, folder: Path) -> Written:
        """Writes it below `folder`: `data/` and `state.json`. In the background, on every rank."""

    @abstractmethod
    def _read(self, found: Found, like: Mapping[str, Any]) -> dict[str, Any]:
        """The state in fresh memory, from files that are verified. On every rank."""

    def _release(self, captured: Any) -> None:  # noqa: B027 (nothing to do is fine)
        """The capture is written, or will never be."""

    # -- the protocol ---------------------------------------------------------------------------

    def save(
        self, step: int, state: Mapping[str, Any], *, healing: Mapping[str, Any] | None = None
    ) -> None:
        """Copies the state now and writes it in the background."""
        self._save(step, state, healing, copy=True)

    def save_held(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        healing: Mapping[str, Any] | None = None,
        created: float | None = None,
    ) -> None:
        """`save` of a state that nobody changes until `wait` returns: there is no copy.

        Args:
            step: as in `save`.
            state: as in `save`.
            healing: as in `save`.
            created: when it was copied, if that was earlier.
        """
        self._save(step, state, healing, copy=False, created=created)

    def steps(self) -> list[Saved]:
        """The complete checkpoints, ascending. One under way is not among them."""
        return [
            manifest.saved(found.folder, found.manifest, self.nonfinite_ok)
            for found in listing.counting(self.root).values()
        ]

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every file."""
        found = self._checked(step)
        return manifest.saved(found.folder, found.manifest, self.nonfinite_ok)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Verifies every file, then reads."""
        found = self._checked(step)
        try:
            state = self._read(found, like)
        except StoreError:
            raise
        except _CRAFTED as error:
            told = f"{type(error).__name__}: {str(error)[:200]}"
            raise StoreError(
                f"{found.folder} holds a state that healcore does not write ({told}): nothing was "
                "restored, use an older checkpoint"
            ) from error
        healing = None
        if found.manifest.healing:
            healing = json.loads(regular.read(found.folder / manifest.HEALING))
        return Restored(state, healing)

    def mark(self, step: int, status: Status) -> None:
        """Sets the status, in one atomic step."""
        protocol.checked_status(status)
        found = self._find(step)
        saved = manifest.saved(found.folder, found.manifest, self.nonfinite_ok)
        if status == "good" and not saved.finite:
            raise NotFinite(step, saved.nonfinite)

        def action() -> None:
            # Before it too: a crash may have left two saves of this step, and one is meant.
            committing.clear_superseded(self.root)
            manifest.write_status(found.folder, status)
            committing.clear_superseded(self.root)

        self._change(f"step {step} cannot be marked {status}", action)

    def delete(self, step: int) -> None:
        """Removes all saves of a step, unless the last known-good one is what counts for it."""
        self._behind.join()
        if retention.is_last_good(self.steps(), step):
            raise LastGoodKept(step)
        self.drop(step)

    def wait(self) -> None:
        """Waits until everything is on disk."""
        self._behind.wait()

    def failures(self) -> list[SaveFailed]:
        """Failures not told yet."""
        return self._behind.failures()

    def problems(self) -> list[str]:
        """Directories that are no checkpoint, files that belong to none, damaged status files."""
        return listing.problems(self.root)

    # -- beyond it ------------------------------------------------------------------------------

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints that `steps` does not list any more, and why. The content is not read.

        A crash leaves none: a save gets its name when it is complete, and loses it first.
        """
        return [
            CheckpointDamaged(step, str(folder), wrong.file, wrong.difference)
            for folder, wrong in listing.incomplete(self.root)
            if (step := listing.step_of(folder)) is not None
        ]

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, meant or not; saves nothing.

        Raises:
            UnsavableState: there is something in the state that cannot be saved.
        """
        self._behind.join()

        def look() -> tuple[str, ...]:
            captured = self._capture(state, copy=True)
            try:
                captured.settle()
                return inspection.nonfinite(captured.blocks())
            finally:
                self._release(captured)

        return ranks.united(ranks.together(self._ranks, look))

    @property
    def processes(self) -> Ranks:
        """Those that save together. To exchange over while nothing is being written."""
        return self._ranks

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, so that the next would wait for it."""
        return self._behind.pending(self._written)

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves with NaN or Inf where that is not meant, and in which arrays; each is told once.

        Of those that are written; it does not wait.
        """
        found, self._nonfinite = self._nonfinite, []
        return found

    def queues(self) -> list[tuple[DirectoryStore, Background]]:
        """Itself, and the queue in which checkpoints are proven."""
        return [(self, self._proofs)]

    def drop(self, step: int) -> None:
        """`delete` without the question whether what counts is the last known-good one.

        A known-good save of the step that a newer one has superseded stays, if it is the last.
        """
        self._find(step)

        def action() -> None:
            committing.clear_superseded(self.root)
            saves = listing.complete(self.root).get(step, [])
            counting = listing.newest(saves)
            for each in reversed(saves):  # a crash leaves the newer ones
                if each is counting or manifest.read_status(each.folder) != "good":
                    committing.remove(self.root, each.folder)

        self._change(f"step {step} cannot be deleted", action)

    # -- within ---------------------------------------------------------------------------------

    def _save(
        self,
        step: int,
        state: Mapping[str, Any],
        healing: Mapping[str, Any] | None,
        *,
        copy: bool,
        created: float | None = None,
    ) -> None:
        step = protocol.checked_step(step)
        kept = None if healing is None else protocol.frozen(healing)
        if self._written is not None and self.busy:
            self._written.result()  # one copy at a time
        item = Item(step, time.time() if created is None else created, self.format, kept)
        try:
            captured = self._capture(state, copy=copy)
        except Exception as error:
            if self._ranks.world > 1:  # the others have a copy, and wait for this rank's
                failure = error
                self._written = self._behind.submit(
                    step, "while copying the state", lambda: self._without(item, failure)
                )
            if isinstance(error, StoreError):
                raise
            raise SaveFailed(step, "while copying the state", error) from error

        def job() -> None:
            try:
                bad = committing.commit(
                    self.root, self._ranks, item, lambda folder: self._write(captured, folder)
                )
            finally:
                self._release(captured)
            bad = inspection.unmeant(bad, self.nonfinite_ok)
            if bad:
                self._nonfinite.append((step, bad))

        self._written = self._behind.submit(step, "while writing", job)

    def _without(self, item: Item, failure: Exception) -> None:
        """Tells the other ranks that this one could not copy its state. Here `save` has raised."""

        def fail(folder: Path) -> Written:
            raise failure

        with suppress(SaveFailed):
            committing.commit(self.root, self._ranks, item, fail)

    def _find(self, step: int) -> Found:
        """The checkpoint that counts for a step, the same on every rank.

        Raises:
            CheckpointDamaged: there is a directory for it, and no complete checkpoint in it.
            NotThere: there is not even that.
        """
        step = protocol.checked_step(step)
        self._behind.join()

        def look() -> Found | StoreError:
            found = listing.counting(self.root)
            if step in found:
                return found[step]
            damaged = [error for error in self.damaged() if error.step == step]
            return damaged[0] if damaged else NotThere(step, list(found), str(self.root))

        looked = ranks.on_first(self._ranks, look)
        if isinstance(looked, StoreError):
            raise looked
        return looked

    def _checked(self, step: int) -> Found:
        """The same, every digest recomputed; the files are divided among the ranks."""
        found = self._find(step)
        mine = sorted(found.manifest.files)[self._ranks.rank :: self._ranks.world]
        for wrong in self._ranks.gather(listing.first_difference(found, mine)):
            if wrong is not None:
                raise CheckpointDamaged(step, str(found.folder), wrong.file, wrong.difference)
        return found

    def _change(self, what: str, action: Callable[[], None]) -> None:
        """Changes something on disk, from rank 0.

        Raises:
            StoreError: it did not work.
        """
        try:
            ranks.on_first(self._ranks, action)
        except OSError as error:
            raise StoreError(f"{what} in {self.root}: {error.strerror or error}") from error
