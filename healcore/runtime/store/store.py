"""`CheckpointStore`: the checkpoints of one run, in host memory and in one or more directories.

A save takes one copy of the state. The background inspects the copy, keeps it in memory, and writes
it to each directory, whose files `manifest` describes. A save is known by its step and its attempt.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from healcore import console
from healcore.runtime.store import files, manifest
from healcore.runtime.store.array_format import (
    ArrayFormat,
    HostCopy,
    Record,
    Target,
    sealed_record,
)
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
    superfluous,
)
from healcore.runtime.store.manifest import StoredCheckpoint
from healcore.runtime.store.ranks import Alone, Ranks, gather_results, run_on_each, run_on_first
from healcore.runtime.store.writer import Writer, join

T = TypeVar("T")
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
        self.ranks = ranks or Alone()
        """The ranks that save together. Exchange over them only while nothing is being written."""
        array_format.world = self.ranks.world
        self.keep = None if keep is None else keep.checked()
        """How many copies of each kind to keep in memory, or None to keep none. It is set to None
        if the copies do not fit into the host's memory."""
        self.copies: dict[int, HostCopy] = {}
        """Step -> inspected copy in memory, for a rollback within milliseconds. The dictionary is
        replaced, never changed, because the background replaces it too."""
        self.protected: frozenset[int] = frozenset()
        """Steps whose copies stay in memory."""
        self.nonfinite_ok: tuple[str, ...] = ()
        """Patterns of array names where NaN and Inf are allowed. May be changed at any time."""
        self.trainer_save: Callable[[], None] | None = None
        """Saves a checkpoint that the policy orders, if a trainer saves in place of the run."""
        self._inspecting: Thread | None = None
        """Ends when the last copy is inspected and in memory, or has failed."""
        self._writing: Thread | None = None
        """Ends when the last copy is written, or has failed."""
        self._nonfinite: deque[tuple[int, tuple[str, ...]]] = deque()
        """Step and array names of each save with disallowed NaN or Inf, for `take_nonfinite`."""
        self._last_step = -1
        """Step of the last copy, or -1."""
        self._failed: list[Path] = []
        """Folders of failed saves. A thread of the framework may still write there."""
        self._reported: set[str] = set()
        """Texts of problems with single directories that were reported."""
        if root is None or isinstance(root, str | os.PathLike):
            root = () if root is None else (root,)
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
                for record in manifest.scan(root).records.values():
                    runs.setdefault(str(record.get("run", "")), root)
        if len(runs) > 1:
            named = ", ".join(f"{root} has run {run}" for run, root in runs.items())
            raise StoreError(
                f"the directories of a list are of one run, and here {named}: nothing was read. "
                "Pass the directories of one run, or an empty directory in place of the other"
            )

    # -- saving -----------------------------------------------------------------------------------

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
        join(self._writing)  # at most one copy is pending; several deletions may be
        try:
            copy = self.format.copy(step, state, record)
        except Exception as failure:
            if self.ranks.world > 1:  # the other ranks would wait for this rank
                self.submit(step, partial(self._fail_on_all, failure))
            raise
        self._last_step = copy.step
        self._inspecting = self.submit(copy.step, partial(self._inspect, copy))
        self._writing = self.submit(copy.step, partial(self._write, copy))

    def take_nonfinite(self, up_to: float = math.inf) -> list[tuple[int, tuple[str, ...]]]:
        """The saves with disallowed NaN or Inf since the last call.

        Waits until these saves are inspected. All saves but the last one are already.

        Args:
            up_to: the last step to look at.

        Returns:
            Step and array names of each such save, oldest first.
        """
        if up_to >= self._last_step:
            join(self._inspecting)
        found = []
        while self._nonfinite and self._nonfinite[0][0] <= up_to:
            found.append(self._nonfinite.popleft())
        return found

    def nonfinite_in(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of the arrays in a state that hold NaN or Inf, allowed or not; saves nothing.

        Args:
            state: as for `save`.

        Returns:
            The names on any rank, sorted.

        Raises:
            UnsavableState: the state holds something that cannot be saved.
        """
        if self.ranks.world > 1:
            self.join()  # the save in progress exchanges messages with the other ranks too
        found = gather_results(self.ranks, lambda: self.format.nonfinite_in(state))
        return tuple(sorted(set().union(*found)))

    def _inspect(self, copy: HostCopy) -> None:
        """Inspects a copy, and keeps it in memory. Every rank calls it."""

        def inspect() -> tuple[tuple[str, ...], bool]:
            try:
                names = self.format.inspect(copy)
            except Exception as error:
                raise SaveFailed(copy.step, "while copying the state", error) from error
            return names, self._has_room(copy)

        names, has_room = zip(*gather_results(self.ranks, inspect), strict=True)
        if not all(has_room):
            self._keep_none(copy)
        copy.nonfinite, copy.is_inspected = tuple(sorted(set().union(*names))), True
        wrong = disallowed(copy.nonfinite, self.nonfinite_ok)
        if wrong:
            self._nonfinite.append((copy.step, wrong))
        if self.keep is not None:
            self._keep_in_memory({**self.copies, copy.step: copy}, newest=copy)

    def _has_room(self, copy: HostCopy) -> bool:
        """Whether the copies that follow fit into half of the free host memory.

        Assumes that all ranks share this machine: a slow rollback is better than an OOM kill. The
        other half is for data loaders, the page cache and the next allocation.
        """
        if self.keep is None:
            return True
        following = self.keep.most - len(self.copies)
        return following <= 0 or following * copy.nbytes * self.ranks.world <= free_bytes() / 2

    def _keep_none(self, copy: HostCopy) -> None:
        """Keeps no copies in memory from now on; StoreError for a store without a directory."""
        each = f"{copy.nbytes / 1e9:.3g} GB each, {self.ranks.world} ranks"
        line = f"the copies of the state ({each}) do not fit into half of the free host memory"
        if not self.durable:
            raise StoreError(f"{line}: pass a directory as the store")
        console.warning(f"{line}: checkpoints go to disk only")
        self.keep, self.copies = None, {}

    def _keep_in_memory(
        self, copies: Mapping[int, HostCopy], newest: HostCopy | None = None
    ) -> None:
        """Keeps as many of these copies as `keep` allows.

        The memory of the others is used again, except of the newest, which is not written yet.
        """
        if self.keep is None:
            return
        saves = [CheckpointInfo.of(copy, None, self.nonfinite_ok) for copy in copies.values()]
        attempts = AttemptHistory.newest(each.history for each in copies.values())
        surplus = superfluous(
            attempts.with_status(saves), self.keep, nonfinite=0, stay=self.protected
        )
        before = self.copies.values()
        self.copies = {step: copy for step, copy in copies.items() if step not in surplus}
        for each in before:
            if each is not newest and each not in self.copies.values():
                self.format.release(each.flat)

    def _write(self, copy: HostCopy) -> None:
        """Writes a checkpoint to each directory. Every rank calls it.

        Raises SaveFailed if no directory has it. A directory that fails alone is reported.
        """
        if not copy.is_inspected:  # the inspection has failed
            return
        failures: list[SaveFailed] = []
        elsewhere = ""
        for root in self.roots:
            try:
                self._write_checkpoint(root, copy)
                elsewhere = elsewhere or str(root)
            except Exception as error:
                failures.append(SaveFailed(copy.step, f"while writing to {root}", error))
        for failure in failures:
            failure.elsewhere = elsewhere
        self._failures += failures
        if copy not in self.copies.values():
            self.format.release(copy.flat)

    def _write_checkpoint(self, root: Path, copy: HostCopy) -> None:
        """Writes a checkpoint atomically. Every rank calls it; if one fails, all raise."""

        def begin() -> Path:
            while self._failed:
                files.discard(self._failed.pop())
            folder = files.new_temporary(root)
            folder.mkdir()
            return folder

        # All exchanges of the ranks go through `Ranks.gather`, in the same order.
        folder = run_on_first(self.ranks, begin)
        shared, own = dict[str, Any](), dict[str, Any]()
        for name, entry in copy.flat.entries.items():
            (own if entry.get("per_rank") else shared)[name] = entry
        try:
            run_on_each(self.ranks, lambda: self.format.write(copy, folder / manifest.DATA))
            entries = [shared, *self.ranks.gather(own)]
            complete = partial(manifest.complete, root, folder, copy, entries)
            run_on_first(self.ranks, complete)
        except Exception:
            if self.ranks.rank == 0:
                files.discard(folder)
                self._failed.append(folder)
            raise

    def _fail_on_all(self, failure: Exception) -> None:
        """Makes a save fail on every rank because this rank could not copy its state."""

        def fail() -> None:
            raise failure

        run_on_each(self.ranks, fail)

    # -- listing ----------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """The complete checkpoints, ascending by step. Reads no arrays.

        A save in memory hides an older save of the same step. If no directory can be read, only
        memory is listed, and `take_failures` returns the error.

        Raises:
            StoreError: no directory can be read, and memory is empty.
        """
        found = self._scan()
        saves = {saved.step: saved for saved in found.listed(self.nonfinite_ok)}
        for step, copy in self.copies.items():
            if step not in saves or saves[step].attempt != copy.attempt:
                saves[step] = CheckpointInfo.of(copy, None, self.nonfinite_ok)
        histories = [found.history, *(copy.history for copy in self.copies.values())]
        attempts = AttemptHistory.newest(histories)
        return attempts.with_status(saves[step] for step in sorted(saves))

    def steps_on_disk(self) -> list[int]:
        """The steps of the complete checkpoints in the directories, ascending.

        Raises:
            StoreError: no directory can be read, and memory is empty.
        """
        return [*self._scan().complete]

    def records(self) -> dict[int, dict[str, Any]]:
        """The records of the run.

        Returns:
            Step -> record.

        Raises:
            StoreError: no directory can be read, and memory is empty.
        """
        records = self._scan().records
        for step, copy in self.copies.items():
            record = copy.unsealed_record
            if record is not None:
                records[step] = record
        return records

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints on disk that are too damaged for `checkpoints` to list. Reads no arrays.

        A run names them at its start. Otherwise a step that is missing in the list would look like
        a step that was never saved.
        """
        return self._scan().damaged

    def _scan(self, step: int | None = None) -> manifest.FoundCheckpoints:
        """The checkpoints in the directories, of all steps or of one step.

        Raises StoreError if no directory can be read, and memory is empty.
        """
        join(self._inspecting)
        try:
            readable = self._in_each("the checkpoints cannot be read", os.listdir)
        except StoreError as error:
            if not self.copies:
                raise
            self._report_once(f"{error}; the copies in memory are used")
            readable = {}
        return manifest.scan(*readable, step=step)

    # -- reading and changing ---------------------------------------------------------------------

    def verify(self, step: int) -> None:
        """Recomputes every digest of the files. A copy in memory has none.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointDamaged: a digest differs.
            CheckpointNotFound: the step has no checkpoint.
        """
        saves = self._find(step)
        if saves:
            self._first_intact(saves)

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
        self.join()
        copy = self.copies.get(step)
        if all(self.ranks.gather(copy is not None)):
            assert copy is not None
            match = partial(self.format.match, step, copy.flat.entries, like)
            target = run_on_each(self.ranks, match)
            arrays = run_on_each(self.ranks, lambda: self.format.from_memory(copy, target))
            return Restored(self.format.assemble(target, arrays), copy.unsealed_record)
        intact = self._first_intact(self._find(step))
        folder = intact.folder / manifest.DATA

        def read() -> tuple[Target, dict[str, Any] | None]:
            with intact.only_written_by_healcore():
                target = self.format.match(step, intact.entries(self.ranks.rank), like)
                return target, self.format.read_small(folder, target)

        # All ranks raise or none: the others would wait for a rank that raised.
        target, arrays = run_on_each(self.ranks, read)
        with intact.only_written_by_healcore():
            if arrays is None:
                arrays = self.format.read_large(folder, target)
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
        saves = self._find(step)
        copy = self.copies.get(step)
        if copy is not None:
            copy.record, copy.history = sealed, AttemptHistory.of(record)
            self._keep_in_memory(self.copies)
        attempt = saves[0].manifest.attempt if copy is None else copy.attempt

        def write(root: Path) -> None:
            folder = root / manifest.directory_name(step, attempt)
            if folder.exists():  # a directory may have missed the save
                files.replace(folder / manifest.RECORD, sealed)

        failure = f"the record of step {step} cannot be written"
        run_on_first(self.ranks, lambda: self._in_each(failure, write))

    def delete(self, step: int) -> None:
        """Removes a checkpoint from memory and from each directory, atomically.

        Args:
            step: step of the checkpoint. A step without one is ignored.

        Raises:
            StoreError: no directory can delete. If only some cannot, that is reported once.
        """
        self.join()
        self.copies = {at: copy for at, copy in self.copies.items() if at != step}

        def remove(root: Path) -> None:
            for folder in manifest.folders_of(root, step):
                manifest.remove(folder)

        failure = f"step {step} cannot be deleted"
        run_on_first(self.ranks, lambda: self._in_each(failure, remove))

    def _find(self, step: int) -> list[StoredCheckpoint]:
        """The equal saves of a step in the directories; empty if only memory has it.

        Raises CheckpointNotFound, or CheckpointDamaged for an incomplete directory.
        """
        self.join()
        in_memory = all(self.ranks.gather(step in self.copies))

        def find() -> list[StoredCheckpoint]:
            found = self._scan(step)
            if in_memory or step in found.complete:
                return found.complete.get(step, [])
            if found.damaged:
                raise found.damaged[0]
            existing = sorted({*self._scan().complete, *self.copies})
            raise CheckpointNotFound(step, existing, self.place or MEMORY)

        return run_on_first(self.ranks, find)

    def _first_intact(self, saves: Sequence[StoredCheckpoint]) -> StoredCheckpoint:
        """The first intact of equal saves; reports the damaged ones before it.

        The ranks share the files. Raises CheckpointDamaged if all are damaged.
        """

        def check(stored: StoredCheckpoint) -> None:
            for error in manifest.find_damage(stored, self.ranks.rank, self.ranks.world):
                raise error

        *others, last = saves
        for each in others:
            try:
                run_on_each(self.ranks, partial(check, each))
                return each
            except CheckpointDamaged as error:
                self._failures.append(error)
        run_on_each(self.ranks, partial(check, last))
        return last

    def _in_each(self, failure: str, action: Callable[[Path], T]) -> dict[Path, T]:
        """The result of an action in each directory. Reports the failure of some once.

        Raises StoreError if the action fails in each directory.
        """
        results: dict[Path, T] = {}
        failures: list[str] = []
        for root in self.roots:
            try:
                results[root] = action(root)
            except OSError as error:
                failures.append(f"{failure} in {root}: {error.strerror}")
        if failures and not results:
            raise StoreError(failures[0])
        for text in failures:
            self._report_once(f"{text}; the other directories are used")
        return results

    def _report_once(self, text: str) -> None:
        """Reports a problem, unless it was reported."""
        if text not in self._reported:
            self._reported.add(text)
            self._failures.append(StoreError(text))


def free_bytes() -> float:
    """Free memory of the machine or of its container, in bytes, or infinity if it is unknown.

    In a container the limit of the container counts: the kernel kills a process that exceeds it,
    however much memory the machine has.
    """
    found = math.inf
    with suppress(OSError, ValueError, IndexError):  # Linux
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = min(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable:"))
    with suppress(OSError, ValueError):  # cgroup v2; the limit "max" is no number
        container = Path("/sys/fs/cgroup")
        limit = int((container / "memory.max").read_text())
        found = min(found, limit - int((container / "memory.current").read_text()))
    return found
