"""Base of the stores on disk: one directory per checkpoint, complete only with its manifest.

    root/
      step-0000000120.5f3a9c21/        a fresh directory for every save
        data/                          files of the framework's own writer
        state.json                     structure of the state, Python values
        state-rank-00001.json          the same for values that are saved per rank, if any
        healing.json                   the healing state, if there is one
        manifest.json                  written last: size and digest of all of the above
        status.json                    candidate, good or quarantined; may change
      .tmp-healcore-<pid>-…/           work in progress: a save, or a checkpoint being deleted

A save is written to a temporary directory, which gets its final name when everything in it is on
disk. A deletion is the reverse: the directory loses its name first, in one atomic step, and is
emptied then. The next start finishes what a crash has left.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from healcore import regular_file
from healcore.runtime.store import (
    commit,
    files,
    inspection,
    manifest,
    protocol,
    ranks,
    structure,
)
from healcore.runtime.store.background import Background
from healcore.runtime.store.claim import held_by_another
from healcore.runtime.store.commit import Written
from healcore.runtime.store.copies import Copier, StateCopy
from healcore.runtime.store.errors import CheckpointDamaged, NotThere, StoreError
from healcore.runtime.store.inspection import Digest
from healcore.runtime.store.manifest import Found
from healcore.runtime.store.protocol import Restored, Saved, Status
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.structure import Flat
from healcore.runtime.store.tier import Tier

_CRAFTED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""Errors that a structure raises which has the right digest and was not written by a store."""


class DirectoryStore(Tier):
    """Checkpoints in the directories below one root. A framework adds its writer and reader.

    Args:
        root: directory of this run's checkpoints and of nothing else; created if necessary.
        copier: takes the copies.
        nonfinite_ok: patterns of array names where NaN and Inf are allowed.
        ranks: the processes that save together, into a directory that all of them see. They call
            every method together, except `steps` and `problems`.
    """

    format: str
    """Format of the files in `data`, for the manifest."""
    root: Path
    """Absolute, because the program may change its working directory."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        copier: Copier,
        *,
        nonfinite_ok: Collection[str] = (),
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(self.format, copier, nonfinite_ok)
        self.root = Path(root).absolute()
        self.processes = ranks or Alone()
        # Several ranks exchange while they write and verify, so they do both in one thread. A rank
        # alone verifies in a second thread, so that the next save need not wait.
        alone = self.processes.world == 1
        self.queue = Background(f"healcore-{self.format}-verify") if alone else self._saves
        self._written: Future[None] | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            os.listdir(self.root)
        except OSError as error:
            raise StoreError(
                f"{self.root} cannot be used for checkpoints: {error.strerror}; "
                "pass a directory that can be made and written"
            ) from error
        # A living process in another container cannot be told from a process that has ended.
        sweeps = self.processes.rank == 0 and not held_by_another(self.root)
        self.swept = commit.sweep(self.root) if sweeps else []
        """Stale files of killed processes that were removed just now."""

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def _write_arrays(self, arrays: dict[str, Any], folder: Path) -> dict[str, Digest]:
        """Writes arrays below the new `folder`. In the background, on every rank.

        Returns path below `folder` -> digest, of the files that need not be read for a digest.
        """

    def _complete_arrays(self, folder: Path) -> None:
        """Completes the files that all ranks have written. In the background, on rank 0."""

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
        self.write(step, lambda: self.copier.copy(step, state, healing), self.copier.release)

    def write(
        self, step: int, take: Callable[[], StateCopy], release: Callable[[StateCopy], None]
    ) -> None:
        """Takes a copy once the previous copy is written, and writes it in the background.

        `release` is called with the copy when it is not needed any more.
        """
        if self._written is not None and self.busy:
            self._written.result()  # one copy at a time
        try:
            copy = take()
        except Exception as error:
            if self.processes.world > 1:  # the others have a copy, and wait for this rank's
                failure = error
                self._written = self._saves.submit(
                    step, "while copying the state", lambda: self._raise_on_all(failure)
                )
            raise
        self._written = self._saves.submit(
            step, "while writing", lambda: self._commit(copy, release)
        )

    def steps(self) -> list[Saved]:
        """The complete checkpoints, ascending, without a save in progress."""
        return [self._listed(found) for found in manifest.counting(self.root).values()]

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every file."""
        return self._listed(self._checked(step))

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Verifies every file, then reads."""
        found, copier = self._checked(step), self.copier

        def check() -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], Flat]:
            with _only_written_by_healcore(found):
                saved, healing = self._small_files(found)
                some = protocol.wanted(saved, like)
                live = copier.checked(step, saved, some) if some else Flat({}, {}, {})
                return saved, healing, some, live

        # On all ranks or on no rank: the others would wait for a rank that raised.
        saved, healing, some, live = ranks.on_each(self.processes, check)
        entries = {name: saved[name] for name in some}
        with _only_written_by_healcore(found):
            arrays = self._read_arrays(found, entries, some, live)
            return Restored(copier.assemble(entries, arrays, some, live), healing)

    def problems(self) -> list[str]:
        """Directories that are no checkpoint, unknown files, damaged status files."""
        return manifest.problems(self.root)

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints that are too damaged for `steps` to list. Their content is not read.

        A crash leaves no such directory: a save gets its name last, and loses its name first.
        """
        return manifest.incomplete(self.root)

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf on any rank; saves nothing."""
        of_rank = super().nonfinite_in
        return ranks.united(ranks.together(self.processes, lambda: of_rank(state)))

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, so that the next save would wait."""
        return self._saves.pending(self._written)

    def drop(self, step: int) -> None:
        """`delete`, even of the last known-good checkpoint.

        A known-good save of the step that a newer save has superseded stays if it is the last.
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

    def _commit(self, copy: StateCopy, release: Callable[[StateCopy], None]) -> None:
        """Writes a copy. In the background, on every rank."""
        try:
            ranks.on_each(self.processes, copy.settle)
            # The manifest has the time of rank 0.
            copy.created = ranks.agreed(self.processes, copy.created)
            bad = commit.commit(
                self.root,
                self.processes,
                copy,
                self.format,
                lambda folder: self._write(copy, folder),
                lambda folder: self._complete_arrays(folder / manifest.DATA),
            )
            bad = inspection.disallowed(bad, self.nonfinite_ok)
            if bad and copy.found is None:  # memory has reported what it has inspected
                self._nonfinite.append((copy.step, bad))
        finally:
            release(copy)

    def _raise_on_all(self, failure: Exception) -> None:
        """Makes the save fail on the other ranks because this rank could not copy its state."""

        def fail() -> None:
            raise failure

        with suppress(type(failure)):  # `save` has raised it on this rank
            ranks.on_each(self.processes, fail)

    def _write(self, copy: StateCopy, folder: Path) -> Written:
        """Writes `data/` and `state.json`. In the background, on every rank."""
        arrays = self.copier.arrays(copy.snapshot)
        # Checked during the write: the write waits for the disk, the check for memory.
        with ThreadPoolExecutor(1) as pool:
            checking = pool.submit(copy.nonfinite)
            written = self._write_arrays(arrays, folder / manifest.DATA)
            bad = checking.result()
        # Each rank writes its per-rank entries, and rank 0 also writes the shared entries.
        entries = copy.snapshot.flat.entries
        own = {name: entry for name, entry in entries.items() if entry.get("per_rank")}
        if own:
            files.write_new(folder / _own(self.processes.rank), structure.dumps(own))
        if self.processes.rank == 0:
            shared = {name: entry for name, entry in entries.items() if name not in own}
            files.write_new(folder / manifest.STATE, structure.dumps(shared))
        digests = {f"{manifest.DATA}/{name}": found for name, found in written.items()}
        return Written(digests, len(arrays), bad)

    # -- restoring ------------------------------------------------------------------------------

    def _small_files(self, found: Found) -> tuple[dict[str, Any], dict[str, Any] | None]:
        """The structure of the state and the healing state, from the bytes that are digested."""

        def content(name: str) -> dict[str, Any]:
            try:
                data = regular_file.read(found.folder / name)
            except OSError as error:
                raise found.damaged(name, f"cannot be read ({error.strerror})") from error
            if inspection.digest_of(data) != found.manifest.files[name]:
                raise found.damaged(name, manifest.DIFFERS)
            return {**json.loads(data)}

        own = _own(self.processes.rank)
        saved = content(manifest.STATE)
        saved |= content(own) if own in found.manifest.files else {}
        return saved, content(manifest.HEALING) if found.manifest.healing else None

    def _listed(self, found: Found) -> Saved:
        return manifest.saved(found, self.nonfinite_ok)

    def _saved(self, step: int) -> tuple[Found, Saved]:
        found = self._find(step)
        return found, self._listed(found)

    def _set_status(self, found: Found, status: Status) -> None:
        def action() -> None:
            # Before it too: a crash may have left two saves of this step.
            commit.clear_superseded(self.root)
            manifest.write_status(found.folder, status)
            commit.clear_superseded(self.root)

        self._change(f"step {found.manifest.step} cannot be marked {status}", action)

    def _find(self, step: int) -> Found:
        """The checkpoint that counts for a step, the same on every rank.

        Raises CheckpointDamaged if its directory is incomplete, NotThere if there is no directory.
        """
        step = protocol.checked_step(step)
        self.join()

        def look() -> Found:
            found = manifest.counting(self.root)
            if step in found:
                return found[step]
            for error in self.damaged():
                if error.step == step:
                    raise error
            raise NotThere(step, list(found), str(self.root))

        return ranks.on_first(self.processes, look)

    def _checked(self, step: int) -> Found:
        """`_find`, with every digest recomputed; the files are divided among the ranks."""
        found = self._find(step)

        def check() -> None:
            mine = sorted(found.manifest.files)[self.processes.rank :: self.processes.world]
            resized = manifest.missing_or_resized(found.folder, found.manifest)
            for error in [resized] if resized else manifest.differences(found, mine):
                raise error

        ranks.on_each(self.processes, check)
        return found

    def _change(self, what: str, action: Callable[[], None]) -> None:
        """Changes something on disk, from rank 0; StoreError if that fails."""
        try:
            ranks.on_first(self.processes, action)
        except OSError as error:
            raise StoreError(f"{what} in {self.root}: {error.strerror or error}") from error


@contextmanager
def _only_written_by_healcore(found: Found) -> Iterator[None]:
    """Raises CheckpointDamaged for content with the right digests that no store has written."""
    try:
        yield
    except StoreError:
        raise
    except _CRAFTED as error:
        why = f"holds a state that healcore does not write ({type(error).__name__}: {error!s:.200})"
        raise found.damaged(manifest.STATE, why, malformed=True) from error


def _own(rank: int) -> str:
    """The file of a rank's per-rank entries."""
    return f"state-rank-{rank:05d}.json"
