"""`CheckpointStore`: the checkpoints of one run, in host memory and in one or more directories.

A save takes one copy of the state. The background inspects the copy, keeps it in memory, and writes
it to each directory, whose files `manifest` describes.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from healcore import console
from healcore.runtime.store import files, manifest
from healcore.runtime.store.array_format import ArrayFormat, Target
from healcore.runtime.store.checkpoints import (
    IN_MEMORY,
    MEMORY,
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
from healcore.runtime.store.state_copy import HostCopy, Record, checked_step, sealed_record
from healcore.runtime.store.writer import Writer

Root = str | os.PathLike[str]
"""A directory of checkpoints."""


class CheckpointStore(Writer):
    """Checkpoints of one run, by step: in host memory, in directories, or in both.

        store = healcore.torch.DCPStore("checkpoints")  # or healcore.jax.OrbaxStore
        for saved in store.checkpoints():
            print(saved.step, saved.status, saved.finite)

    A checkpoint in both is restored from memory, else from the first directory with an intact copy.
    A directory that cannot be read or written is reported, and the others are used.

    The thread that trains calls all methods. The background may call `verify`, `delete` and
    `checkpoints`. The ranks of a run call every method together, except `checkpoints`.

    Args:
        array_format: copies, writes and reads the arrays of the framework.
        root: directory of this run's checkpoints and of nothing else, created if necessary; or
            several, each of which gets every checkpoint; or None for memory only.
        keep: copies to keep in memory, or None for directories only. A save adds one copy.
        ranks: the processes that save together, into directories that all of them see.

    Raises:
        StoreError: a directory cannot be used.
    """

    root: Path | None = None
    """Absolute path of the first directory, or None. A run writes its events there."""

    def __init__(
        self,
        array_format: ArrayFormat,
        root: Root | Sequence[Root] | None = None,
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
            root = ()
        elif isinstance(root, str | os.PathLike):
            root = (root,)
        # The program may change its working directory.
        self.roots = tuple(Path(each).absolute() for each in root)
        """The directories, each of which has all checkpoints."""
        for each in self.roots:
            try:
                files.make_directory(each)
                os.listdir(each)
            except OSError as error:
                raise StoreError(
                    f"{each} cannot be used for checkpoints: {error.strerror}; "
                    "pass a directory that can be created and written"
                ) from error
        if self.roots:
            self.root = self.roots[0]

    @property
    def durable(self) -> bool:
        """Whether the checkpoints outlive the process.

        False for a store in memory only: a restart then begins a new run.
        """
        return bool(self.roots)

    @property
    def place(self) -> str:
        """The directories, for messages, or an empty string without any."""
        return " and ".join(map(str, self.roots))

    def check_run(self) -> None:
        """Checks that all directories are of one run, before any is read or written.

        A restore would otherwise mix the checkpoints of two runs, and a save would delete some.

        Raises:
            StoreError: two directories have checkpoints of different runs.
        """
        runs: dict[str, Path] = {}
        for root in self.roots:
            with suppress(StoreError):  # the first scan reports it
                record = AttemptHistory.newest_record(manifest.scan(root).records)
                if record is not None:
                    runs.setdefault(str(record.get("run", "")), root)
        if len(runs) > 1:
            named = ", ".join(f"{root} has run {run}" for run, root in runs.items())
            raise StoreError(
                f"the directories of a list are of one run, and here {named}: nothing was read. "
                "Pass the directories of one run, or an empty directory in place of the other"
            )

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
        self._inspected, self._written = inspected, written = Event(), Event()
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

        A save in memory hides an older save of the same step. If no directory can be read, only
        memory is listed, and `take_failures` returns the error.

        Raises:
            StoreError: no directory can be read, and memory is empty.
        """
        self._wait_for_inspection()
        found = self._on_disk()
        saves = {saved.step: saved for saved in manifest.listed(found, self.nonfinite_ok)}
        for step, copy in self.ring.copies.items():
            if step not in saves or saves[step].created != copy.created:
                saves[step] = CheckpointInfo.of(copy, None, self.nonfinite_ok)
        attempts = AttemptHistory.newest(found.records | self.ring.records())
        return attempts.with_status(saves[step] for step in sorted(saves))

    def steps_on_disk(self) -> list[int]:
        """The steps of the complete checkpoints in the directories, ascending.

        Raises:
            StoreError: no directory can be read.
        """
        return [*self._scan().complete]

    def records(self) -> dict[int, dict[str, Any]]:
        """The intact records of the run, also of checkpoints whose arrays are damaged.

        Returns:
            Step -> record.

        Raises:
            StoreError: no directory can be read.
        """
        self._wait_for_inspection()
        return self._scan().records | self.ring.records()

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints on disk that are too damaged for `checkpoints` to list. Reads no arrays.

        A run names them at its start. Otherwise a step that is missing in the list would look like
        a step that was never saved.
        """
        return self._scan().damaged

    def verify(self, step: int) -> None:
        """Recomputes every digest of the files. A copy in memory has none.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointDamaged: a digest differs.
            CheckpointNotFound: the step has no checkpoint.
        """
        _, stored = self._locate(step)
        if stored is not None:
            self._first_intact(stored)

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
            state = run_on_each(self.ranks, lambda: self.format.restore(copy, like))
            return Restored(state, copy.unsealed_record)
        assert stored is not None, "a checkpoint is in memory or on disk"
        intact = self._first_intact(stored)

        def match() -> Target:
            with intact.only_written_by_healcore():
                entries = intact.entries(self.ranks.rank)
                return self.format.match(step, entries, like)

        # All ranks raise or none: the others would wait for a rank that raised.
        target = run_on_each(self.ranks, match)
        with intact.only_written_by_healcore():
            arrays = self.format.read(intact.folder / manifest.DATA, target)
            return Restored(self.format.assemble(target, arrays), intact.record)

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
        folders: list[Path] = []
        if stored is not None:
            folders = [each.folder for each in (stored, *stored.twins)]

        def write(folder: Path) -> None:
            files.replace(folder / manifest.RECORD, sealed)

        failure = f"the record of step {step} cannot be written"
        self._change({each.parent for each in folders}, lambda: folders, write, failure)

    def delete(self, step: int) -> None:
        """Removes a checkpoint from memory and from each directory, atomically.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointNotFound: the step has no checkpoint.
            StoreError: no directory can delete. If only some cannot, that is reported once.
        """
        self._locate(step)
        self.ring.forget(step)

        def find() -> list[Path]:
            return [folder for root in self.roots for folder in manifest.folders_of(root, step)]

        self._change({*self.roots}, find, manifest.remove, f"step {step} cannot be deleted")

    def _wait_for_inspection(self) -> None:
        """Waits until the last copy is inspected, and in the ring."""
        if self.busy:  # never in a forked child
            self._inspected.wait()

    def _complete(self, copy: HostCopy, inspected: Event, written: Event) -> None:
        """Inspects a copy, adds it to memory, and writes it to disk. Every rank calls it."""
        unused: HostCopy | None = copy
        try:
            found = gather_results(self.ranks, lambda: self._inspect(copy))
            names, has_room, created = zip(*found, strict=True)
            copy.created = created[0]  # the save is known by it, on every rank
            copy.nonfinite = tuple(sorted(set().union(*names)))
            nonfinite = disallowed(copy.nonfinite, self.nonfinite_ok)
            if nonfinite:
                self._nonfinite.append((copy.step, nonfinite))
            if not all(has_room):
                self._close_ring(copy)
            unused = self.ring.add(copy, self.nonfinite_ok)
            inspected.set()
            self._write(copy)
        finally:
            inspected.set()  # also after a failure
            if unused is not None:
                self.format.release(unused.flat)
            written.set()

    def _inspect(self, copy: HostCopy) -> tuple[tuple[str, ...], bool, float]:
        """The names of arrays with NaN or Inf, whether memory has room, and the copy's time."""
        try:
            nonfinite = self.format.inspect(copy)
        except Exception as error:
            raise SaveFailed(copy.step, "while copying the state", error) from error
        return nonfinite, self.ring.has_room(copy, self.ranks.world), copy.created

    def _close_ring(self, copy: HostCopy) -> None:
        """Keeps no copies in memory from now on; StoreError for a store without a directory."""
        assert self.ring.keep is not None, "an empty ring has room"
        each = f"{copy.nbytes / 1e9:.3g} GB each, {self.ranks.world} ranks"
        line = f"{self.ring.keep.most + 1} copies of the state ({each})"
        line += " do not fit into half of the free host memory"
        if not self.durable:
            raise StoreError(f"{line}: pass a directory as the store")
        console.warning(f"{line}: checkpoints go to disk only")
        self.ring.keep, self.ring.copies = None, {}

    def _write(self, copy: HostCopy) -> None:
        """Writes a checkpoint to each directory. Every rank calls it.

        Raises SaveFailed if no directory has it. A directory that fails alone is reported.
        """
        failures: list[SaveFailed] = []
        elsewhere = ""
        for root in self.roots:
            try:
                self._write_checkpoint(root, copy)
                elsewhere = elsewhere or str(root)
            except Exception as error:
                failures.append(SaveFailed(copy.step, f"while writing to {root}", error))
        self._failures += [replace(failure, elsewhere=elsewhere) for failure in failures]

    def _write_checkpoint(self, root: Path, copy: HostCopy) -> None:
        """Writes a checkpoint atomically. Every rank calls it; if one fails, all raise."""
        # All exchanges of the ranks go through `Ranks.gather`, in the same order.
        while self._failed:
            files.discard(self._failed.pop())
        folder = root / broadcast(self.ranks, files.new_temporary())
        shared, own = copy.flat.entries_by_owner()
        try:
            run_on_first(self.ranks, lambda: folder.mkdir())
            run_on_each(self.ranks, lambda: self.format.write(copy, folder / manifest.DATA))
            entries = [shared, *self.ranks.gather(own)]
            complete = partial(manifest.complete, root, folder, copy, entries, self.format.name)
            run_on_first(self.ranks, complete)
        except Exception:
            if self.ranks.rank == 0:
                files.discard(folder)
                self._failed.append(folder)
            raise

    def _fail_on_others(self, failure: Exception) -> None:
        """Makes a save fail on the other ranks because this rank could not copy its state."""

        def fail() -> None:
            raise failure

        with suppress(type(failure)):  # `save` raises it on this rank
            run_on_each(self.ranks, fail)

    def _scan(self, step: int | None = None) -> manifest.FoundCheckpoints:
        """The checkpoints in the directories, of all steps or of one step.

        Raises StoreError if no directory can be read. Reports a directory that alone cannot.
        """
        found = manifest.scan(*self.roots, step=step)
        for error in found.unreadable:
            text = f"{error}; the other directories are used"
            self._report_once(text, StoreError(text))
        return found

    def _on_disk(self, step: int | None = None) -> manifest.FoundCheckpoints:
        """The result of `_scan`, or nothing if only memory can be read."""
        try:
            return self._scan(step)
        except StoreError as error:
            if not self.ring.copies:
                raise
            text = f"{error}; the copies in memory are used"
            self._report_once(text, StoreError(text))
            return manifest.scan()

    def _report_once(self, key: str, error: StoreError) -> None:
        """Reports an error, unless an error with this key was reported."""
        if key not in self._reported:
            self._reported.add(key)
            self._failures.append(error)

    def _locate(self, step: int) -> tuple[HostCopy | None, StoredCheckpoint | None]:
        """The copy in memory if every rank has one, and the same save on disk.

        If any rank has lost its copy, no rank uses its copy, and any save on disk counts. At least
        one of the two results is not None. Raises CheckpointNotFound, or CheckpointDamaged for an
        incomplete directory.
        """
        step = checked_step(step)
        self.join()
        copy = self.ring.copies.get(step)

        def find_stored() -> StoredCheckpoint | StoreError:
            found = self._on_disk(step)
            if step in found.complete:
                return found.complete[step]
            if found.damaged:
                return found.damaged[0]
            existing = sorted({*self._on_disk().complete, *self.ring.copies})
            return CheckpointNotFound(step, existing, self.place or MEMORY)

        stored = run_on_first(self.ranks, find_stored)
        in_memory = all(self.ranks.gather(copy is not None))
        if isinstance(stored, StoreError):
            if not in_memory:
                raise stored
            return copy, None
        if copy is None or not in_memory:
            return None, stored
        if stored.manifest.created != copy.created:  # another save of this step
            return copy, None
        return copy, stored

    def _first_intact(self, stored: StoredCheckpoint) -> StoredCheckpoint:
        """The first intact of equal saves; reports the damaged ones before it.

        Raises CheckpointDamaged if all are damaged.
        """
        *others, last = (stored, *stored.twins)
        for each in others:
            try:
                self._check_files(each)
                return each
            except CheckpointDamaged as error:
                self._failures.append(error)
        self._check_files(last)
        return last

    def _check_files(self, checkpoint: StoredCheckpoint) -> None:
        """Recomputes the digests of the files, shared among the ranks; CheckpointDamaged."""
        rank, world = self.ranks.rank, self.ranks.world

        def check() -> None:
            for error in manifest.find_damage(checkpoint, rank, world):
                raise error

        run_on_each(self.ranks, check)

    def _change(
        self,
        roots: set[Path],
        find: Callable[[], Sequence[Path]],
        action: Callable[[Path], None],
        failure: str,
    ) -> None:
        """Changes the folders of a checkpoint in some directories, on rank 0.

        Raises StoreError if that fails in each directory. The failure of some is reported once.
        """

        def change() -> dict[Path, str]:
            failed: dict[Path, str] = {}
            for folder in find():
                try:
                    action(folder)
                except OSError as error:
                    failed[folder.parent] = f"{failure} in {folder.parent}: {error.strerror}"
            if roots and failed.keys() >= roots:
                raise StoreError(next(iter(failed.values())))
            return failed

        for root, text in run_on_first(self.ranks, change).items():
            self._report_once(f"changes in {root}", StoreError(text))
