"""What all stores on disk share: one directory per checkpoint, complete only with its manifest.

    root/
      step-0000000120.5f3a9c21/        a fresh directory for every save
        data/                          what the framework's own writer wrote
        state.json                     structure of the state, Python values
        state-rank-00001.json          the same of what is saved per rank, if there is any
        healing.json                   the healing state, if there is one
        manifest.json                  written last: size and digest of all of the above
        status.json                    candidate, good or quarantined; may change
      .tmp-healcore-<pid>-…/           work in progress: a save, or a checkpoint being deleted

A save happens in a temporary directory that gets its final name when everything in it is on disk. A
deletion is the reverse: the directory loses its name first, in one atomic step, and is emptied
then. The name is the journal: the next start finishes what a crash has left.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from healcore import regular_file
from healcore.runtime.store import (
    commit,
    files,
    inspection,
    manifest,
    protocol,
    ranks,
    retention,
    structure,
)
from healcore.runtime.store.background import Background
from healcore.runtime.store.claim import held_by_another
from healcore.runtime.store.commit import Item, Written
from healcore.runtime.store.errors import (
    CheckpointDamaged,
    LastGoodKept,
    NotFinite,
    NotThere,
    SaveFailed,
    StateMismatch,
    StoreError,
)
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.manifest import Found, Wrong
from healcore.runtime.store.protocol import Restored, Saved, Status
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.snapshot import Copier
from healcore.runtime.store.structure import Flat

_CRAFTED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""What a structure raises that is not damaged, and that no store can have written."""


class DirectoryStore(ABC):
    """Checkpoints in the directories below one root. A framework adds its writer and reader.

    Args:
        root: directory of this run's checkpoints and of nothing else; created if necessary.
        ranks: the processes that save together, into a directory that all of them see. They call
            every method together, except `steps` and `problems`.
    """

    format: str
    """What `data` contains, for the manifest."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        copier: Copier,
        *,
        nonfinite_ok: Collection[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        # Absolute: the program may change its working directory.
        self.root = Path(root).absolute()
        self.nonfinite_ok = tuple(nonfinite_ok)
        """Patterns of array names where NaN and Inf are allowed. May be changed at any time."""
        self._copier = copier
        self._spare: Any | None = None
        self._ranks: Ranks = ranks or Alone()
        self._behind = Background(f"healcore-{self.format}")
        # Several ranks exchange while they write and while they verify: in one order, hence in one
        # thread. A rank alone verifies in a second thread: the next save need not wait for that.
        alone = self._ranks.world == 1
        self._verifications = (
            Background(f"healcore-{self.format}-verify") if alone else self._behind
        )
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
        # A process in another container looks as if it had gone, even while it is alive.
        sweeps = self._ranks.rank == 0 and not held_by_another(self.root)
        self.swept = commit.sweep(self.root) if sweeps else []
        """Stale files of killed processes, removed just now."""

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def _write_arrays(self, arrays: dict[str, Any], folder: Path) -> dict[str, Digest]:
        """Writes arrays below `folder`, which is new. In the background, on every rank.

        Returns path below `folder` -> digest, of files that are on disk and need not be read again.
        """

    def _complete_arrays(self, folder: Path) -> None:  # noqa: B027 - not every writer needs it
        """Completes what all ranks have written below `folder`. In the background, on rank 0."""

    @abstractmethod
    def _read_arrays(
        self,
        found: Found,
        entries: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Any],
        live: Flat,
    ) -> dict[str, Any]:
        """The arrays of some entries in fresh memory, from verified files. On every rank."""

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
        """`save` without a copy, of a state that nobody changes until `wait` returns.

        `created` is when it was copied, if that was earlier.
        """
        self._save(step, state, healing, copy=False, created=created)

    def steps(self) -> list[Saved]:
        """The complete checkpoints, ascending; not the one under way."""
        return [self._listed(found) for found in manifest.counting(self.root).values()]

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every file."""
        return self._listed(self._checked(step))

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Verifies every file, then reads."""
        found = self._checked(step)
        try:
            return self._read(found, like)
        except StoreError:
            raise
        except _CRAFTED as error:
            raise _malformed(found, error) from error

    def mark(self, step: int, status: Status) -> None:
        """Sets the status, in one atomic step."""
        protocol.checked_status(status)
        found = self._find(step)
        saved = self._listed(found)
        if status == "good" and not saved.finite:
            raise NotFinite(step, saved.nonfinite)

        def action() -> None:
            # Also before: a crash may have left two saves of this step, and only one counts.
            commit.clear_superseded(self.root)
            manifest.write_status(found.folder, status)
            commit.clear_superseded(self.root)

        self._change(f"step {step} cannot be marked {status}", action)

    def delete(self, step: int) -> None:
        """Removes all saves of a step, unless the one that counts is the last known-good one."""
        self._behind.join()
        if retention.is_last_good(self.steps(), step):
            raise LastGoodKept(step)
        self.drop(step)

    def wait(self) -> None:
        """Waits until everything is on disk."""
        self._behind.wait()

    def failures(self) -> list[SaveFailed]:
        """Failures since the last call."""
        return self._behind.failures()

    def problems(self) -> list[str]:
        """Directories that are no checkpoint, files that belong to none, damaged status files."""
        return manifest.problems(self.root)

    # -- beyond it ------------------------------------------------------------------------------

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints that `steps` does not list any more, and why. The content is not read.

        A crash leaves none: a save gets its name when it is complete, and loses it first.
        """
        return [
            CheckpointDamaged(step, str(folder), wrong.file, wrong.difference)
            for folder, wrong in manifest.incomplete(self.root)
            if (step := manifest.step_of(folder)) is not None
        ]

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing."""
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
        """The ranks that save together; to exchange over while nothing is being written."""
        return self._ranks

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, so that the next would wait for it."""
        return self._behind.pending(self._written)

    def nonfinite_found(self) -> list[tuple[int, tuple[str, ...]]]:
        """Saves written since the last call with NaN or Inf that is not allowed, and where."""
        found, self._nonfinite = self._nonfinite, []
        return found

    def queues(self) -> list[tuple[DirectoryStore, Background]]:
        """Itself, and the queue in which checkpoints are verified."""
        return [(self, self._verifications)]

    def drop(self, step: int) -> None:
        """`delete`, even if the save that counts is the last known-good one.

        A known-good save of the step that a newer one has superseded stays if it is the last.
        """
        self._find(step)

        def action() -> None:
            commit.clear_superseded(self.root)
            saves = manifest.complete(self.root).get(step, [])
            counting = manifest.newest(saves)
            for each in reversed(saves):  # so that a crash leaves the newer ones
                if each is counting or manifest.read_status(each.folder) != "good":
                    commit.remove(self.root, each.folder)

        self._change(f"step {step} cannot be deleted", action)

    # -- saving ---------------------------------------------------------------------------------

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
                    step, "while copying the state", lambda: self._commit_failure(item, failure)
                )
            if isinstance(error, StoreError):
                raise
            raise SaveFailed(step, "while copying the state", error) from error

        def job() -> None:
            try:
                bad = commit.commit(
                    self.root,
                    self._ranks,
                    item,
                    lambda folder: self._write(captured, folder),
                    lambda folder: self._complete_arrays(folder / manifest.DATA),
                )
            finally:
                self._release(captured)
            bad = inspection.disallowed(bad, self.nonfinite_ok)
            if bad:
                self._nonfinite.append((step, bad))

        self._written = self._behind.submit(step, "while writing", job)

    def _commit_failure(self, item: Item, failure: Exception) -> None:
        """Makes the save fail on the other ranks because this one could not copy its state."""

        def fail(folder: Path) -> Written:
            raise failure

        with suppress(SaveFailed):  # `save` has raised it on this rank
            commit.commit(self.root, self._ranks, item, fail, lambda folder: None)

    def _capture(self, state: Mapping[str, Any], *, copy: bool) -> Any:
        """A snapshot of the state; without `copy` in the state's own memory."""
        if not copy:
            return self._copier.borrow(state)
        spare, self._spare = self._spare, None
        return self._copier.take(state, spare)

    def _release(self, captured: Any) -> None:
        """Keeps the memory of a snapshot that is not needed any more for the next one."""
        if captured.arena is not None:
            self._spare = captured

    def _write(self, captured: Any, folder: Path) -> Written:
        """Writes `data/` and `state.json`. In the background, on every rank."""
        captured.settle()
        arrays = self._copier.arrays(captured)
        # Checked during the write: the write waits for the disk, the check for memory.
        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(inspection.nonfinite, captured.blocks())
            written = self._write_arrays(arrays, folder / manifest.DATA)
            bad = checking.result()
        digests = {f"{manifest.DATA}/{name}": found for name, found in written.items()}
        digests |= self._write_structure(captured.flat.entries, folder)
        return Written(digests, len(arrays), bad)

    def _write_structure(
        self, entries: Mapping[str, Mapping[str, Any]], folder: Path
    ) -> dict[str, Digest]:
        """Rank 0 writes what is the same on every rank; every rank writes what is its own."""
        parts = {_own(self._ranks.rank): {k: v for k, v in entries.items() if v.get("per_rank")}}
        if self._ranks.rank == 0:
            parts[manifest.STATE] = {k: v for k, v in entries.items() if not v.get("per_rank")}
        digests = {}
        for name, part in parts.items():
            if part or name == manifest.STATE:
                data = structure.dumps(part)
                files.write_new(folder / name, data)
                digests[name] = Digest(len(data), xxhash.xxh3_128_hexdigest(data))
        return digests

    # -- restoring ------------------------------------------------------------------------------

    def _read(self, found: Found, like: Mapping[str, Any]) -> Restored:
        """The state in fresh memory, from verified files. On every rank."""
        saved, healing = self._small_files(found)
        like = protocol.wanted(saved, like)
        step = found.manifest.step
        try:
            # On all ranks or on none: the others would wait for a rank that raised.
            live = ranks.on_each(
                self._ranks,
                lambda: self._copier.checked(step, saved, like) if like else Flat({}, {}, {}),
            )
        except ranks.RankFailed as error:
            raise StateMismatch(step, [str(error)]) from error
        entries = {name: saved[name] for name in like}
        arrays = self._read_arrays(found, entries, like, live)
        return Restored(self._copier.assemble(entries, arrays, like, live), healing)

    def _small_files(self, found: Found) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The structure of the state and the healing state, each from one read. On every rank.

        The digest is of the bytes that are parsed. If one rank finds damage, all raise its error.
        """
        own = _own(self._ranks.rank)

        def content(name: str) -> dict[str, Any]:
            try:
                data = regular_file.read(found.folder / name)
            except OSError as error:
                raise _damaged(found, Wrong(name, f"cannot be read ({error.strerror})")) from error
            if Digest(len(data), xxhash.xxh3_128_hexdigest(data)) != found.manifest.files[name]:
                raise _damaged(found, Wrong(name, manifest.DIFFERS))
            return {**json.loads(data)}

        saved, healing, wrong = dict[str, Any](), None, None
        try:
            saved = content(manifest.STATE)
            saved |= content(own) if own in found.manifest.files else {}
            healing = content(manifest.HEALING) if found.manifest.healing else None
        except CheckpointDamaged as error:
            wrong = error
        except _CRAFTED as error:
            wrong = _malformed(found, error)
        for error in self._ranks.gather(wrong):
            if error is not None:
                raise error
        return saved, healing

    def _listed(self, found: Found) -> Saved:
        return manifest.saved(found.folder, found.manifest, self.nonfinite_ok)

    def _find(self, step: int) -> Found:
        """The checkpoint that counts for a step, the same on every rank.

        CheckpointDamaged if its directory holds no complete one, NotThere if there is no directory.
        """
        step = protocol.checked_step(step)
        self._behind.join()

        def look() -> Found | StoreError:
            found = manifest.counting(self.root)
            if step in found:
                return found[step]
            damaged = [error for error in self.damaged() if error.step == step]
            return damaged[0] if damaged else NotThere(step, list(found), str(self.root))

        result = ranks.on_first(self._ranks, look)
        if isinstance(result, StoreError):
            raise result
        return result

    def _checked(self, step: int) -> Found:
        """`_find`, with every digest recomputed; the files are divided among the ranks."""
        found = self._find(step)
        mine = sorted(found.manifest.files)[self._ranks.rank :: self._ranks.world]
        for wrong in self._ranks.gather(manifest.first_difference(found, mine)):
            if wrong is not None:
                raise _damaged(found, wrong)
        return found

    def _change(self, what: str, action: Callable[[], None]) -> None:
        """Changes something on disk, from rank 0; StoreError if that fails."""
        try:
            ranks.on_first(self._ranks, action)
        except OSError as error:
            raise StoreError(f"{what} in {self.root}: {error.strerror or error}") from error


def _damaged(found: Found, wrong: Wrong) -> CheckpointDamaged:
    return CheckpointDamaged(found.manifest.step, str(found.folder), wrong.file, wrong.difference)


def _malformed(found: Found, error: Exception) -> CheckpointDamaged:
    why = f"{type(error).__name__}: {str(error)[:200]}"
    return CheckpointDamaged(
        found.manifest.step,
        str(found.folder),
        manifest.STATE,
        f"holds a state that healcore does not write ({why})",
        malformed=True,
    )


def _own(rank: int) -> str:
    """The file of what is saved per rank."""
    return f"state-rank-{rank:05d}.json"
