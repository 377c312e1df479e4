"""`CheckpointStore`: the checkpoints of one run, in host memory and in a directory.

A save takes one copy of the state. The background inspects the copy, keeps it in memory, and writes
it to the directory, whose files `manifest` describes.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from healcore import console
from healcore.runtime.store import files, manifest
from healcore.runtime.store.array_format import ArrayFormat, Target
from healcore.runtime.store.checkpoints import (
    IN_MEMORY,
    AttemptHistory,
    CheckpointDamaged,
    CheckpointInfo,
    CheckpointNotFound,
    Keep,
    Restored,
    SaveFailed,
    StoreError,
    disallowed,
)
from healcore.runtime.store.host_copy import MEMORY, HostCopy, Record, checked_step, sealed_record
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.ranks import (
    Alone,
    Ranks,
    broadcast,
    gather_results,
    run_on_each,
    run_on_first,
)
from healcore.runtime.store.ring import Ring
from healcore.runtime.store.writer import Writer


class CheckpointStore(Writer):
    """Checkpoints of one run, by step: in host memory, in a directory, or in both.

        store = healcore.torch.DCPStore("checkpoints")  # or healcore.jax.OrbaxStore
        for saved in store.checkpoints():
            print(saved.step, saved.status, saved.finite)

    A checkpoint in both is restored from memory, or from the directory if its copy in memory is
    damaged. If the directory cannot be read, the copies in memory are used.

    The thread that trains calls all methods. The background may call `verify`, `delete` and
    `checkpoints`. The ranks of a run call every method together, except `checkpoints`.

    Args:
        array_format: copies, writes and reads the arrays of the framework.
        root: directory of this run's checkpoints and of nothing else, created if necessary, or
            None for memory only.
        keep: copies to keep in memory, or None for the directory only. A save adds one copy.
        ranks: the processes that save together, into a directory that all of them see.

    Raises:
        StoreError: the directory cannot be used.
    """

    root: Path | None = None
    """Absolute directory of the checkpoints, or None."""

    def __init__(
        self,
        array_format: ArrayFormat,
        root: str | os.PathLike[str] | None = None,
        *,
        keep: Keep | None = IN_MEMORY,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.format = array_format
        self.ring = Ring(keep)
        """The copies in memory."""
        self.nonfinite_ok: tuple[str, ...] = ()
        """Patterns of array names where NaN and Inf are allowed. May be changed at any time."""
        self.trainer_save: Callable[[], None] | None = None
        """Saves a checkpoint that the policy orders, if a trainer saves in place of the run."""
        self.ranks = ranks or Alone()
        """The ranks that save together. Exchange over them only while nothing is being written."""
        self._inspected = Event()
        """Set when the last copy is inspected and in the ring, or has failed."""
        self._written = Event()
        """Set when the last copy is written, or has failed."""
        self._inspected.set()
        self._written.set()
        self._nonfinite: deque[tuple[int, tuple[str, ...]]] = deque()
        """Step and array names of each save with disallowed NaN or Inf, for `take_nonfinite`."""
        self._last_step = -1
        """Step of the last copy, or -1."""
        self._reported: set[str] = set()
        """Keys of `_report_once`."""
        self._failed: list[Path] = []
        """Folders of failed saves. A thread of the framework may still write there."""
        if root is None:
            return
        self.root = Path(root).absolute()  # the program may change its working directory
        try:
            files.make_directory(self.root)
            os.listdir(self.root)
        except OSError as error:
            raise StoreError(
                f"{self.root} cannot be used for checkpoints: {error.strerror}; "
                "pass a directory that can be created and written"
            ) from error

    @property
    def durable(self) -> bool:
        """Whether the checkpoints outlive the process.

        False for a store in memory only: a restart then begins a new run.
        """
        return self.root is not None

    @property
    def directories(self) -> int:
        """Number of directories, each of which has all checkpoints."""
        return int(self.durable)

    @property
    def place(self) -> str:
        """Place of the checkpoints, for messages, or an empty string without a directory."""
        return str(self.root or "")

    def save(self, step: int, state: Mapping[str, Any], *, record: Record | None = None) -> None:
        """Copies the state and returns; the copy is inspected and written in the background.

            training     save: copy ── returns ── further steps ──────────────────────────────
                                │
            background          └── inspect ── add to memory ── write ── rename (the commit)
                                                      │                     │
            what has to wait               `take_nonfinite`, lists      the next save, `wait`

        Changing the state afterwards, in place or by donation, does not change the save. The call
        waits while the previous save is still being written. A save of a later attempt replaces
        the older save of its step once the new save is complete.

        Args:
            step: number of the optimizer step, >= 0.
            state: non-empty mapping of names to values, such as `{"params": params}`. A value is a
                tree of arrays and Python values, or an object with `state_dict`. A bare tree, such
                as the pair (params, opt_state), needs a name: `{"state": state}`.
            record: the record of the run, JSON-safe. The attempt of the save is the number of items
                in its list `attempts`, or 1 without the list.

        Raises:
            StoreError: the state is no such mapping.
            UnsavableState: the state holds something that cannot be saved.
            SaveFailed: the state could not be copied. `wait` raises later failures.
        """
        if self.busy:  # never in a forked child
            self._written.wait()  # at most one copy is pending; several deletions may be
        try:
            copy = self.format.copy(step, state, record)
        except Exception as error:
            if self.ranks.world > 1:  # the other ranks would wait for this rank
                self.submit(step, partial(self._fail_on_others, error))
            raise
        inspected, written = Event(), Event()
        self._inspected, self._written = inspected, written
        self._last_step = step
        self.submit(copy.step, partial(self._complete, copy, inspected, written))

    def allow_nonfinite(self, patterns: Iterable[str]) -> None:
        """Allows NaN and Inf in further arrays, from now on.

        Args:
            patterns: array names, or patterns such as `model.*.mask`; added to `nonfinite_ok`.
        """
        self.nonfinite_ok += tuple(patterns)

    def protect(self, steps: frozenset[int]) -> None:
        """Keeps the copies of these steps in memory, until the next call names others.

        Args:
            steps: steps of checkpoints. A step without a copy has no effect.
        """
        self.ring.protected = steps

    def take_nonfinite(self, up_to: float = math.inf) -> list[tuple[int, tuple[str, ...]]]:
        """The saves with disallowed NaN or Inf since the last call.

        Waits until these saves are inspected. All saves but the last one are already.

        Args:
            up_to: the last step to look at.

        Returns:
            Step and array names of each such save, oldest first.
        """
        if up_to >= self._last_step:
            self._wait_for_inspection()
        found = []
        while self._nonfinite and self._nonfinite[0][0] <= up_to:
            found.append(self._nonfinite.popleft())
        return found

    def nonfinite_in(
        self, state: Mapping[str, Any], names: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing.

        Args:
            state: as for `save`.
            names: names of the arrays to look at, or None for all.

        Returns:
            The names on any rank, sorted.

        Raises:
            UnsavableState: the state holds something that cannot be saved.
        """
        if self.ranks.world > 1:
            self.join()  # the save in progress exchanges messages with the other ranks too
        found = gather_results(self.ranks, lambda: self.format.nonfinite_in(state, names))
        return tuple(sorted(set().union(*found)))

    def checkpoints(self) -> list[CheckpointInfo]:
        """The complete checkpoints, ascending by step. Reads no arrays.

        A save in memory hides an older save of the same step. If the directory cannot be read, only
        memory is listed, and `take_failures` returns the error.

        Raises:
            StoreError: the directory cannot be read, and memory is empty.
        """
        self._wait_for_inspection()
        saves = {saved.step: saved for saved in self.ring.listed(self.nonfinite_ok)}
        found = self._on_disk()
        for saved in manifest.listed(found, self.nonfinite_ok):
            copy = self.ring.copies.get(saved.step)
            if copy is None or copy.path == saved.path:
                saves[saved.step] = saved
        attempts = AttemptHistory.newest(found.records | self.ring.records())
        return attempts.with_status(saves[step] for step in sorted(saves))

    def steps_on_disk(self) -> list[int]:
        """The steps of the complete checkpoints in the directory, ascending.

        Raises:
            StoreError: the directory cannot be read.
        """
        return [*self._scan().complete]

    def records(self) -> dict[int, dict[str, Any]]:
        """The intact records of the run, also of checkpoints whose arrays are damaged.

        Returns:
            Step -> record.

        Raises:
            StoreError: the directory cannot be read.
        """
        self._wait_for_inspection()
        return self._scan().records | self.ring.records()

    def verify(self, step: int) -> None:
        """Recomputes every digest of the files, or of the copy in memory if there are no files.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointDamaged: a digest differs.
            CheckpointNotFound: the step has no checkpoint.
        """
        copy, stored = self._locate(step)
        if stored:
            self._first_intact(stored)
        elif copy is not None:
            run_on_each(self.ranks, lambda: self.format.check(copy))

    def restore(self, step: int, like: Mapping[str, Any]) -> Restored:
        """Verifies a checkpoint and reads it, from memory if possible.

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
        copy, stored = self._locate(step)
        if copy is not None:
            try:
                state = run_on_each(self.ranks, lambda: self.format.restore(copy, like))
                return Restored(state, copy.unsealed_record)
            except CheckpointDamaged as error:
                self.ring.forget(step)
                if not stored:
                    raise
                self._failures.append(error)
        intact = self._first_intact(stored)

        def match() -> Target:
            with intact.only_written_by_healcore():
                entries = intact.entries(self.ranks.rank)
                return self.format.match(step, entries, like)

        # All ranks raise or none: the others would wait for a rank that raised.
        target = run_on_each(self.ranks, match)
        with intact.only_written_by_healcore():
            arrays = self.format.read(intact, target)
            state = self.format.assemble(target, arrays)
            return Restored(state, intact.record)

    def replace_record(self, step: int, record: Record) -> None:
        """Replaces the record of a checkpoint, atomically. The arrays stay.

        This commits a rollback. If the process is killed before, the next start resumes as if there
        had been no rollback. If it is killed after, the next start resumes after the rollback.

        Args:
            step: step of the checkpoint.
            record: the new record, JSON-safe.

        Raises:
            CheckpointNotFound: the step has no checkpoint.
            StoreError: the record could not be written.
        """
        sealed = sealed_record(record)
        _, stored = self._locate(step)
        copy = self.ring.copies.get(step)
        if copy is not None:
            copy.record = sealed
            self.ring.prune(self.nonfinite_ok)
        failure = f"the record of step {step} cannot be written"
        self._change_in_each_directory(
            failure, stored, lambda each: files.replace(each / manifest.RECORD, sealed)
        )

    def delete(self, step: int) -> None:
        """Removes a checkpoint, atomically.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointNotFound: the step has no checkpoint.
        """
        _, stored = self._locate(step)
        self.ring.forget(step)
        self._change_in_each_directory(f"step {step} cannot be deleted", stored, manifest.remove)

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints on disk that are too damaged for `checkpoints` to list. Reads no arrays.

        A run names them at its start. Otherwise a step that is missing in the list would look like
        a step that was never saved.
        """
        return self._scan().damaged

    def _wait_for_inspection(self) -> None:
        """Waits until the last copy is inspected, and in the ring."""
        if self.busy:  # never in a forked child
            self._inspected.wait()

    def _complete(self, copy: HostCopy, inspected: Event, written: Event) -> None:
        """Inspects a copy, adds it to memory, and writes it to disk. Every rank calls it."""
        unused: HostCopy | None = copy
        try:
            found = gather_results(self.ranks, lambda: self._inspect(copy))
            names, has_room = zip(*found, strict=True)
            copy.nonfinite = tuple(sorted(set().union(*names)))
            nonfinite = disallowed(copy.nonfinite, self.nonfinite_ok)
            if nonfinite:
                self._nonfinite.append((copy.step, nonfinite))
            if not all(has_room):
                self._close_ring(copy)
            unused = self.ring.add(copy, self.nonfinite_ok)
            inspected.set()
            if self.root is not None:
                copy.path = str(self._write_checkpoint(self.root, copy))
        finally:
            inspected.set()  # also after a failure
            if unused is not None:
                self.format.release(unused)
            written.set()

    def _inspect(self, copy: HostCopy) -> tuple[tuple[str, ...], bool]:
        """The names of arrays with NaN or Inf, and whether memory has room for more copies."""
        try:
            nonfinite = self.format.inspect(copy)
        except Exception as error:
            raise SaveFailed(copy.step, "while copying the state", error) from error
        return nonfinite, self.ring.has_room(copy, self.ranks.world)

    def _close_ring(self, copy: HostCopy) -> None:
        """Keeps no copies in memory from now on; StoreError for a store without a directory."""
        assert self.ring.keep is not None, "an empty ring has room"
        each = f"{copy.nbytes / 1e9:.3g} GB each, {self.ranks.world} ranks"
        line = f"{self.ring.keep.most + 1} copies of the state ({each})"
        line += " do not fit into half of the free host memory"
        if self.root is None:
            raise StoreError(f"{line}: pass a directory as the store")
        console.warning(f"{line}: checkpoints go to disk only")
        self.ring.keep, self.ring.copies = None, {}

    def _write_checkpoint(self, root: Path, copy: HostCopy) -> Path:
        """Writes a checkpoint atomically; returns its directory. Every rank calls it.

        If one rank fails, all ranks raise SaveFailed.
        """
        # All exchanges of the ranks go through `Ranks.gather`, in the same order.
        while self._failed:
            files.discard(self._failed.pop())
        folder = root / broadcast(self.ranks, files.new_temporary())
        try:
            run_on_first(self.ranks, lambda: folder.mkdir())
            run_on_each(self.ranks, lambda: self._write(copy, folder))
            complete = partial(manifest.complete, root, folder, copy, self.format.name)
            return run_on_first(self.ranks, complete)
        except Exception as error:
            if self.ranks.rank == 0:
                files.discard(folder)
                self._failed.append(folder)
            raise SaveFailed(copy.step, f"while writing to {root}", error) from error

    def _write(self, copy: HostCopy, folder: Path) -> None:
        """Writes `data/` and `state.json`, or the only file. Every rank calls it."""
        content = None
        if self.ranks.world == 1:
            content = self.format.content(copy)
        if content is not None:
            manifest.write_only_file(folder, copy, content)
            return
        self.format.write(copy, folder / manifest.DATA)
        manifest.write_entries(folder, copy.flat.entries, self.ranks.rank)

    def _fail_on_others(self, failure: Exception) -> None:
        """Makes a save fail on the other ranks because this rank could not copy its state."""

        def fail() -> None:
            raise failure

        with suppress(type(failure)):  # `save` raises it on this rank
            run_on_each(self.ranks, fail)

    def _scan(self, step: int | None = None) -> manifest.FoundCheckpoints:
        """The checkpoints on disk, all or of one step; StoreError if they cannot be read."""
        return manifest.scan(self.root, step)

    def _on_disk(self, step: int | None = None) -> manifest.FoundCheckpoints:
        """The checkpoints in the directory, or the checkpoints of one step.

        Nothing if only memory can be read.
        """
        try:
            return self._scan(step)
        except StoreError as error:
            if not self.ring.copies:
                raise
            self._report_scan(error, "the copies in memory are used")
            return manifest.scan(None)

    def _report_scan(self, error: StoreError, instead: str) -> None:
        """Reports once that a directory cannot be read."""
        self._report_once(str(error), StoreError(f"{error}; {instead}"))

    def _report_once(self, key: str, error: StoreError) -> None:
        """Reports an error, unless an error with this key was reported."""
        if key not in self._reported:
            self._reported.add(key)
            self._failures.append(error)

    def _locate(self, step: int) -> tuple[HostCopy | None, list[StoredCheckpoint]]:
        """The copy in memory if every rank has one, and the same save in each directory.

        If any rank has lost its copy, no rank uses its copy, and any save on disk counts. At least
        one of the two results is not empty. Raises CheckpointNotFound, or CheckpointDamaged for an
        incomplete directory.
        """
        step = checked_step(step)
        self.join()
        copy = self.ring.copies.get(step)

        def find_stored() -> list[StoredCheckpoint] | StoreError:
            found = self._on_disk(step)
            if found.complete:
                return found.copies_of(step)
            if found.damaged:
                return found.damaged[0]
            existing = sorted({*self._on_disk().complete, *self.ring.copies})
            return CheckpointNotFound(step, existing, self.place or MEMORY)

        stored = run_on_first(self.ranks, find_stored)
        in_memory = all(self.ranks.gather(copy is not None))
        if isinstance(stored, StoreError):
            if not in_memory:
                raise stored
            return copy, []
        if copy is None or not in_memory:
            return None, stored
        is_same_save = any(copy.path == str(each.folder) for each in stored)
        if not is_same_save:
            return copy, []
        return copy, stored

    def _first_intact(self, stored: Sequence[StoredCheckpoint]) -> StoredCheckpoint:
        """The first intact save of some equal saves; CheckpointDamaged if all are damaged."""
        assert stored, "a checkpoint is in memory or on disk"
        for each in stored[:-1]:
            try:
                self._check_files(each)
                return each
            except CheckpointDamaged as error:
                self._failures.append(error)
        self._check_files(stored[-1])
        return stored[-1]

    def _check_files(self, checkpoint: StoredCheckpoint) -> None:
        """Recomputes the digests of the files, shared among the ranks; CheckpointDamaged."""
        rank, world = self.ranks.rank, self.ranks.world

        def check() -> None:
            for error in manifest.find_damage(checkpoint, rank, world):
                raise error

        run_on_each(self.ranks, check)

    def _change_in_each_directory(
        self, failure: str, stored: Sequence[StoredCheckpoint], action: Callable[[Path], None]
    ) -> None:
        """Changes the folder of a checkpoint in each directory, from rank 0.

        If that fails everywhere, raises StoreError. A directory that fails alone is reported, and
        does not stop the other directories.
        """
        errors = []
        for each in stored:
            try:
                run_on_first(self.ranks, partial(action, each.folder))
            except OSError as error:
                root, why = each.folder.parent, error.strerror or error
                errors.append((StoreError(f"{failure} in {root}: {why}"), error))
        if errors and len(errors) == len(stored):
            raise errors[0][0] from errors[0][1]
        self._failures += [error for error, _ in errors]
