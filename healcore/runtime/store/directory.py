"""Base of the stores on disk. Each checkpoint is a directory with a manifest.

    root/
      step-0000000120.1/               step and attempt of the save
        data/                          files that the framework writes
        state.json                     structure of the state, Python values
        state-rank-00001.json          the same for per-rank values, if the state has any
        manifest.json                  size and digest of all files above
        healing.json                   the healing state, if one was saved; a rollback replaces it
      .tmp-healcore-…/                 work in progress: a save, or a checkpoint being deleted

A save is written to a temporary directory, which gets its final name when its files are on disk. A
deletion is the reverse: the directory gets a temporary name, atomically, and is then removed. The
next start removes the temporary directories of a crash.
"""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
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
from healcore.runtime.store.commit import RankPart
from healcore.runtime.store.copies import Copier, StateCopy
from healcore.runtime.store.errors import CheckpointDamaged, CheckpointNotFound, StoreError
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.protocol import Restored, Saved
from healcore.runtime.store.ranks import Alone, Ranks
from healcore.runtime.store.structure import Flat, Leaf
from healcore.runtime.store.tier import Tier

_CRAFTED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError)
"""Errors that reading raises if another program wrote a file with the right digest."""


class DirectoryStore(Tier):
    """Checkpoints in the directories below one root. A subclass writes and reads the arrays.

    Args:
        root: directory of this run's checkpoints and of nothing else; created if necessary.
        copier: copies states to host memory and back.
        nonfinite_ok: patterns of array names where NaN and Inf are allowed.
        ranks: the processes that save together, into a directory that all of them see. They call
            every method together, except `steps`.
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
        self._written: Future[None] | None = None
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            os.listdir(self.root)
        except OSError as error:
            raise StoreError(
                f"{self.root} cannot be used for checkpoints: {error.strerror}; "
                "pass a directory that can be created and written"
            ) from error
        self.swept = [] if self.processes.rank else commit.sweep(self.root)
        """Names of the stale files of killed processes that were removed at construction."""

    # -- the framework's part -------------------------------------------------------------------

    @abstractmethod
    def _write_arrays(self, leaves: dict[str, Leaf], folder: Path) -> None:
        """Writes copies of arrays below the new `folder`. Runs in the background, on every rank."""

    def _complete_arrays(self, folder: Path) -> None:
        """Completes the files of all ranks. Runs in the background, on rank 0."""

    @abstractmethod
    def _read_arrays(
        self,
        checkpoint: StoredCheckpoint,
        entries: Mapping[str, Mapping[str, Any]],
        like: Mapping[str, Any],
        live: Flat,
    ) -> dict[str, Any]:
        """Reads the arrays of some entries from verified files into fresh memory, on every rank."""

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

        `release` is called with the copy after the write.
        """
        if self._written is not None and self.busy:
            self._written.result()  # at most one copy is pending
        try:
            copy = take()
        except Exception as error:
            if self.processes.world > 1:  # the other ranks would wait for this rank
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
        return manifest.listed(self.root, self.nonfinite_ok)

    def verify(self, step: int) -> Saved:
        """Recomputes the digest of every file."""
        self._find_verified(step)
        return next(saved for saved in self.steps() if saved.step == step)

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Verifies every file, then reads the state."""
        checkpoint, copier = self._find_verified(step), self.copier

        def check() -> tuple[dict[str, Any], dict[str, Any] | None, dict[str, Any], Flat]:
            with _only_written_by_healcore(checkpoint):
                saved, healing = self._saved_entries(checkpoint), checkpoint.healing
                wanted = protocol.values_to_restore(saved, like)
                live = copier.flatten_matching(step, saved, wanted) if wanted else Flat({}, {}, {})
                return saved, healing, wanted, live

        # All ranks raise or none: the others would wait for a rank that raised.
        saved, healing, wanted, live = ranks.on_each(self.processes, check)
        entries = {name: saved[name] for name in wanted}
        with _only_written_by_healcore(checkpoint):
            arrays = self._read_arrays(checkpoint, entries, wanted, live)
            return Restored(copier.assemble(entries, arrays, wanted, live), healing)

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints that are too damaged for `steps` to list. Their content is not read.

        A crash leaves no such directory: a save gets its name last, a deletion removes it first.
        """
        return manifest.incomplete(self.root)

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf on any rank; saves nothing."""
        if self.processes.world > 1:
            self.join()  # the save in progress exchanges messages with the other ranks too
        names_on_rank = super().nonfinite_in
        return ranks.union_of_names(ranks.together(self.processes, lambda: names_on_rank(state)))

    @property
    def busy(self) -> bool:
        """Whether a save is still being written, so that the next save would wait."""
        return self._saves.busy

    def healings(self) -> dict[int, dict[str, Any]]:
        """The intact healing states by step, also of checkpoints that are damaged elsewhere."""
        return manifest.healings(self.root)

    def commit(self, step: int, healing: Mapping[str, Any]) -> None:
        """Replaces the healing state: a crash leaves the old or the new one."""
        folder, encoded = self._find(step).folder, protocol.encode_healing(healing)
        self._change(
            f"the healing state of step {step} cannot be written",
            lambda: files.replace(folder / manifest.HEALING, encoded),
        )

    def delete(self, step: int) -> None:
        """Removes a checkpoint."""
        folder = self._find(step).folder
        self._change(f"step {step} cannot be deleted", lambda: commit.remove(self.root, folder))

    # -- saving ---------------------------------------------------------------------------------

    def _commit(self, copy: StateCopy, release: Callable[[StateCopy], None]) -> None:
        """Writes a copy. Runs in the background, on every rank."""
        try:
            ranks.on_each(self.processes, copy.settle)
            # The manifest has the clock time of rank 0.
            copy.created = ranks.agreed(self.processes, copy.created)
            nonfinite = commit.commit(
                self.root,
                self.processes,
                copy,
                self.format,
                lambda folder: self._write(copy, folder),
                lambda folder: self._complete_arrays(folder / manifest.DATA),
            )
            nonfinite = inspection.disallowed(nonfinite, self.nonfinite_ok)
            if nonfinite and copy.inspected is None:  # the memory tier reports inspected copies
                self._nonfinite.append((copy.step, nonfinite))
        finally:
            release(copy)

    def _raise_on_all(self, failure: Exception) -> None:
        """Makes the save fail on the other ranks because this rank could not copy its state."""

        def fail() -> None:
            raise failure

        with suppress(type(failure)):  # `save` raises it on this rank
            ranks.on_each(self.processes, fail)

    def _write(self, copy: StateCopy, folder: Path) -> RankPart:
        """Writes `data/` and `state.json`. Runs in the background, on every rank."""
        leaves = copy.flat.leaves
        inspected = copy.inspected or self.copier.inspect(leaves)
        self._write_arrays(leaves, folder / manifest.DATA)
        # Each rank writes its per-rank entries, and rank 0 also writes the shared entries.
        entries = copy.flat.entries
        own = {name: entry for name, entry in entries.items() if entry.get("per_rank")}
        if own:
            files.write_new(folder / _rank_file(self.processes.rank), structure.dumps(own))
        if self.processes.rank == 0:
            shared = {name: entry for name, entry in entries.items() if name not in own}
            files.write_new(folder / manifest.STATE, structure.dumps(shared))
        return RankPart(len(leaves), inspected.nonfinite)

    # -- restoring ------------------------------------------------------------------------------

    def _saved_entries(self, checkpoint: StoredCheckpoint) -> dict[str, Any]:
        """Reads the structure of the state, and checks the digests."""

        def content(name: str) -> dict[str, Any]:
            try:
                data = regular_file.read(checkpoint.folder / name)
            except OSError as error:
                raise checkpoint.damaged(name, f"cannot be read ({error.strerror})") from error
            if inspection.digest_of(data) != checkpoint.manifest.files[name]:
                raise checkpoint.damaged(name, manifest.DIFFERS)
            return {**json.loads(data)}

        own = _rank_file(self.processes.rank)
        saved = content(manifest.STATE)
        saved |= content(own) if own in checkpoint.manifest.files else {}
        return saved

    def _find(self, step: int) -> StoredCheckpoint:
        """The current save of a step, the same on every rank.

        Raises CheckpointDamaged for an incomplete directory, CheckpointNotFound for no directory.
        """
        step = protocol.checked_step(step)
        self.join()

        def look() -> StoredCheckpoint:
            saves = manifest.complete(self.root)
            if step in saves:
                return saves[step]
            for error in self.damaged():
                if error.step == step:
                    raise error
            raise CheckpointNotFound(step, list(saves), str(self.root))

        return ranks.on_first(self.processes, look)

    def _find_verified(self, step: int) -> StoredCheckpoint:
        """Finds a checkpoint and recomputes every digest, each rank for a share of the files."""
        checkpoint = self._find(step)

        def check() -> None:
            mine = sorted(checkpoint.manifest.files)[self.processes.rank :: self.processes.world]
            resized = manifest.missing_or_resized(checkpoint.folder, checkpoint.manifest)
            for error in [resized] if resized else manifest.find_damage(checkpoint, mine):
                raise error

        ranks.on_each(self.processes, check)
        return checkpoint

    def _change(self, failure: str, action: Callable[[], None]) -> None:
        """Changes something on disk, from rank 0; StoreError if that fails."""
        try:
            ranks.on_first(self.processes, action)
        except OSError as error:
            raise StoreError(f"{failure} in {self.root}: {error.strerror or error}") from error


@contextmanager
def _only_written_by_healcore(checkpoint: StoredCheckpoint) -> Iterator[None]:
    """Raises CheckpointDamaged for content with the right digests that no store has written."""
    try:
        yield
    except StoreError:
        raise
    except _CRAFTED as error:
        why = f"holds a state that healcore does not write ({type(error).__name__}: {error!s:.200})"
        raise checkpoint.damaged(manifest.STATE, why, malformed=True) from error


def _rank_file(rank: int) -> str:
    """Name of the file with a rank's own entries."""
    return f"state-rank-{rank:05d}.json"
