"""`CheckpointStore`: the checkpoints of one run, in host memory and in one or more directories.

A save takes one copy of the state. The background inspects the copy, keeps it in memory, and writes
it to each directory, whose files `manifest` describes. A save is known by its step and its attempt.
One directory may be on a fast local disk, and one on a shared disk: each is a whole store, which
commands and later runs can use alone.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from healcore import console, regular_file
from healcore.console import first_of
from healcore.runtime.store import files, manifest
from healcore.runtime.store.array_format import ArrayFormat, FlatState, Target, nonfinite
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
from healcore.runtime.store.manifest import Manifest, Saved
from healcore.runtime.store.ranks import Alone, Ranks, run_on_each, run_on_first
from healcore.runtime.store.writer import Writer

T = TypeVar("T")
Record = Mapping[str, Any]
"""The record of a run, JSON-safe."""
Root = str | os.PathLike[str]
"""A directory of checkpoints."""
Roots = Root | Sequence[Root]
"""A directory, or several that each get every checkpoint."""


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
        root: Roots | None = None,
        *,
        keep: Keep | None = IN_MEMORY,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__()
        self.format = array_format
        self.ranks = ranks or Alone()
        """The ranks that save together. Exchange over them only while nothing is being written."""
        array_format.world = self.ranks.world
        if keep is None:
            self.keep = None
        else:
            self.keep = keep.checked()
        """How many copies of each kind to keep in memory, or None to keep none. It is set to None
        if the copies do not fit into the host's memory."""
        self.copies: dict[int, Saved] = {}
        """Step -> inspected copy in memory, for a rollback within milliseconds. The dictionary is
        replaced, never changed, because the background replaces it too."""
        self.protected: frozenset[int] = frozenset()
        """Steps whose copies stay in memory."""
        self.nonfinite_ok: tuple[str, ...] = ()
        """Patterns of array names where NaN and Inf are allowed. May be changed at any time."""
        self.trainer_save: Callable[[], None] | None = None
        """Saves a checkpoint that the policy orders, if a trainer saves in place of the run."""
        self._saving: Thread | None = None
        """Ends when the last copy is written, or has failed."""
        self._nonfinite: list[tuple[int, tuple[str, ...]]] = []
        """Step and array names of each save with disallowed NaN or Inf, for `take_nonfinite`."""
        if isinstance(root, str | os.PathLike):
            root = (root,)
        # The program may change its working directory.
        self.roots = tuple(Path(each).absolute() for each in root or ())
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
            self.root = self.root or each

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

    # -- saving -----------------------------------------------------------------------------------

    def save(self, step: int, state: Mapping[str, Any], *, record: Record | None = None) -> None:
        """Copies the state and returns; the copy is inspected and written in the background.

            training     save: copy ── returns ── further steps ──────────────────────────────
                                │
            background          └── inspect ── add to memory ── write ── rename (the commit)

        Changing the state afterwards, in place or by donation, does not change the save. The call
        waits until the previous save is written: at most one copy is pending. A save of a later
        attempt replaces the older save of its step once the new save is complete.

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
        if self._saving is not None:
            self._saving.join()  # deletions may still be pending
        attempt = max(1, len(AttemptHistory.of(record).starts))
        known = {"step": step, "attempt": attempt, "created": time.time()}
        try:
            known["record"] = _copied(record)
            flat = self.format.copied(state)
        except Exception as error:
            failure = error
            if not isinstance(error, StoreError):
                failure = SaveFailed(step, "while copying the state", error)

            def fail() -> None:
                raise failure

            if self.ranks.world > 1:  # the other ranks would wait for this rank
                self.submit(step, partial(run_on_each, self.ranks, fail))
            raise failure from None
        copy = Saved(Manifest(nbytes=flat.nbytes, **known), None, flat)
        self._saving = self.submit(step, partial(self._save, copy, flat))

    def take_nonfinite(self) -> list[tuple[int, tuple[str, ...]]]:
        """The saves with disallowed NaN or Inf since the last call, as step and array names.

        Waits until the last save is complete.
        """
        self.join()
        found, self._nonfinite = self._nonfinite, []
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
        return self._union(lambda: nonfinite(self.format.copied(state)))

    def _union(self, names: Callable[[], Sequence[str]]) -> tuple[str, ...]:
        """The names that a function returns on any rank, sorted. Every rank calls it."""
        return tuple(sorted(set().union(*self.ranks.gather(run_on_each(self.ranks, names)))))

    def _save(self, copy: Saved, flat: FlatState) -> None:
        """Inspects a copy, keeps it in memory, and writes it to each directory. On every rank.

        Raises SaveFailed if no directory has it. A directory that fails alone is reported.
        """
        step = copy.manifest.step
        names = self._union(lambda: nonfinite(flat))
        copy = copy.changed(nonfinite=names)
        wrong = disallowed(names, self.nonfinite_ok)
        if wrong:
            self._nonfinite.append((step, wrong))
        if not all(self.ranks.gather(self._has_room(flat))):
            each = f"{flat.nbytes / 1e9:.3g} GB each, {self.ranks.world} ranks"
            line = f"the copies ({each}) do not fit into half of the free host memory"
            if not self.durable:
                raise StoreError(f"{line}: pass a directory as the store")
            console.warning(f"{line}: checkpoints go to disk only")
            self.keep = None
        self._keep_in_memory({**self.copies, step: copy})
        failures: list[SaveFailed] = []
        elsewhere = ""
        for root in self.roots:
            try:
                self._write(root, copy.manifest, flat)
                elsewhere = elsewhere or str(root)
            except Exception as error:
                failures.append(SaveFailed(step, f"while writing to {root}", error))
        for failure in failures:
            failure.elsewhere = elsewhere
        self._failures.extend(failures)

    def _has_room(self, flat: FlatState) -> bool:
        """Whether the copies that follow fit into half of the free host memory.

        Assumes that all ranks share this machine: a slow rollback is better than an OOM kill. The
        other half is for data loaders, the page cache and the next allocation.
        """
        if self.keep is None:
            following = 0
        else:
            following = self.keep.most - len(self.copies)
        return following <= 0 or following * flat.nbytes * self.ranks.world <= free_bytes() / 2

    def _keep_in_memory(self, copies: Mapping[int, Saved]) -> None:
        """Keeps as many of these copies as `keep` allows."""
        surplus: Sequence[int] = [*copies]
        if self.keep is not None:
            saves = manifest.listed(manifest.counting(copies.values()), self.nonfinite_ok)
            surplus = superfluous(saves, self.keep, nonfinite=0, stay=self.protected)
        self.copies = {step: copy for step, copy in copies.items() if step not in surplus}

    def _write(self, root: Path, known: Manifest, flat: FlatState) -> None:
        """Writes a checkpoint atomically. Every rank calls it; if one fails, all raise."""

        def begin() -> Path:
            # After a save has failed, a thread of the framework may still have written files.
            manifest.sweep(root, folders=[])
            folder = files.new_temporary(root)
            folder.mkdir()
            return folder

        # All exchanges of the ranks go through `Ranks.gather`, in the same order.
        folder = run_on_first(self.ranks, begin)
        shared, own = dict[str, Any](), dict[str, Any]()
        for name, entry in flat.entries.items():
            (own if entry.get("per_rank") else shared)[name] = entry
        try:
            run_on_each(self.ranks, lambda: self.format.write(flat, folder / manifest.DATA))
            entries = [shared, *self.ranks.gather(own)]
            complete = partial(manifest.complete, root, folder, known, entries)
            run_on_first(self.ranks, complete)
        except Exception:
            if self.ranks.rank == 0:
                files.discard(folder)
            raise

    # -- listing ----------------------------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointInfo]:
        """The complete checkpoints, ascending by step. Reads no arrays.

        A save in memory hides an older save of the same step. If no directory can be read, only
        memory is listed, and `take_failures` returns the error.

        Raises:
            StoreError: no directory can be read, and memory is empty.
        """
        return manifest.listed(self._saves(), self.nonfinite_ok)

    def steps_on_disk(self) -> list[int]:
        """The steps of the complete checkpoints in the directories, ascending.

        Raises:
            StoreError: no directory can be read, and memory is empty.
        """
        return [each.step for each in self.checkpoints() if each.path]

    def records(self) -> dict[int, dict[str, Any]]:
        """The records of the run.

        Returns:
            Step -> record.

        Raises:
            StoreError: no directory can be read, and memory is empty.
        """
        saves = self._saves().items()
        return {step: each.record for step, ((each, *_), *_) in saves if each.record is not None}

    def damaged(self) -> list[CheckpointDamaged]:
        """Checkpoints on disk that are too damaged for `checkpoints` to list. Reads no arrays.

        A run names them at its start. Otherwise a step that is missing in the list would look like
        a step that was never saved.
        """
        return manifest.scan(*self._readable())[1]

    def _saves(self) -> dict[int, list[Saved]]:
        """The saves that count in memory and in the directories."""
        found, _ = manifest.scan(*self._readable())
        return manifest.counting([*self.copies.values(), *chain.from_iterable(found.values())])

    def _readable(self) -> Sequence[Path]:
        """The directories that can be read. StoreError if there is none, and memory is empty."""
        try:
            return self._in_each("the checkpoints cannot be read", self.roots, os.listdir)
        except StoreError as error:
            if not self.copies:
                raise
            self.report(StoreError(f"{error}; the copies in memory are used"))
            return ()

    # -- reading and changing ---------------------------------------------------------------------

    def verify(self, step: int) -> None:
        """Recomputes every digest of the files. A copy in memory has none.

        Args:
            step: step of the checkpoint.

        Raises:
            CheckpointDamaged: a digest differs.
            CheckpointNotFound: the step has no checkpoint.
        """
        on_disk = [each for each in self._find(step) if each.folder]
        if on_disk:
            self._first_intact(on_disk, bool)

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
        return self._first_intact(self._find(step), partial(self._read, step, like))

    def _read(self, step: int, like: Mapping[str, Any], saved: Saved) -> Restored:
        """Reads one save of a step, on every rank."""
        form, folder, rank = self.format, saved.folder, self.ranks.rank

        def read() -> tuple[Target, Any]:
            # All ranks raise or none: the others would wait for a rank that raised.
            if folder is None:
                flat = self.copies[step].flat
                target = form.match(step, flat.entries, like)
                return target, form.from_host(flat.leaves, target)
            shared, *own = json.loads(regular_file.read(folder / manifest.STATE))
            target = form.match(step, {**shared, **dict(*own[rank : rank + 1])}, like)
            leaves = form.small_leaves(folder / manifest.DATA, target)
            return target, leaves and form.from_host(leaves, target)

        try:
            target, arrays = run_on_each(self.ranks, read)
            if arrays is None:
                arrays = form.read_large((folder or Path()) / manifest.DATA, target)
            return Restored(form.assemble(target, arrays), _copied(saved.manifest.record))
        except manifest.CRAFTED as error:
            if folder is None or isinstance(error, StoreError):
                raise
            # Digests are no signature: another program may have written the files.
            reason = f"{type(error).__name__}: {error!s:.200}"
            why = f"holds a state that healcore does not write ({reason})"
            raise manifest.damaged(folder, why, manifest.STATE) from error

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
        saves, new = self._find(step), _copied(record)
        if step in self.copies:
            self._keep_in_memory({**self.copies, step: self.copies[step].changed(record=new)})
        on_disk = {each.folder.parent: each.changed(record=new) for each in saves if each.folder}

        def write(root: Path) -> None:
            known, folder, _ = on_disk[root]
            manifest.write(folder or root, known)

        failure = f"the record of step {step} cannot be written"
        run_on_first(self.ranks, lambda: self._in_each(failure, on_disk, write))

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
        run_on_first(self.ranks, lambda: self._in_each(failure, self.roots, remove))

    def _find(self, step: int) -> list[Saved]:
        """The equal saves of a step, those to prefer first.

        Raises CheckpointNotFound, or CheckpointDamaged for an incomplete directory.
        """
        self.join()

        in_memory = all(self.ranks.gather(step in self.copies))

        def find() -> list[Saved]:
            saves = self._saves()
            equal = [each for each in saves.get(step, ()) if each.folder or in_memory]
            if equal:  # without the arrays, because they may be sent to other ranks
                return [each._replace(flat=None) for each in equal]
            for error in self.damaged():
                if error.step == step:
                    raise error
            newest = first_of([*map(str, reversed(saves))]) or "none"
            place = self.place or MEMORY
            raise CheckpointNotFound(f"{place} has no checkpoint of step {step}; it has: {newest}")

        return run_on_first(self.ranks, find)

    def _first_intact(self, saves: Sequence[Saved], read: Callable[[Saved], T]) -> T:
        """The result for the first intact of equal saves; reports the damaged ones before it.

        The ranks share the files. Raises CheckpointDamaged if all are damaged.
        """
        rank, world = self.ranks.rank, self.ranks.world

        def check(saved: Saved) -> None:
            for error in manifest.find_damage(saved, rank, world):
                raise error

        for each in saves:
            try:
                run_on_each(self.ranks, partial(check, each))
                return read(each)
            except CheckpointDamaged as error:
                if each is saves[-1]:
                    raise
                error.other_copy = True
                self._failures.append(error)
        raise AssertionError("no saves")

    def _in_each(
        self, failure: str, roots: Iterable[Path], action: Callable[[Path], object]
    ) -> list[Path]:
        """The directories for which an action succeeds. Reports the failure of some.

        Raises StoreError if all fail.
        """
        done: list[Path] = []
        failures: list[str] = []
        for root in roots:
            try:
                action(root)
                done.append(root)
            except OSError as error:
                failures.append(f"{failure} in {root}: {error.strerror}")
        if failures and not done:
            raise StoreError(failures[0])
        for text in failures:
            self.report(StoreError(f"{text}; the other directories are used"))
        return done

    def report(self, problem: Exception) -> None:
        """Adds a problem to `take_failures`."""
        if not isinstance(problem, StoreError):
            problem = StoreError(str(problem))
        self._failures.append(problem)


def _copied(record: Record | None) -> dict[str, Any] | None:
    """A copy of a record. NaN and Inf are allowed: a run in trouble may have them in its record.

    Raises:
        StoreError: the record is not JSON-safe.
    """
    try:
        return json.loads(json.dumps(record))
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the record must be JSON-safe ({error}): pass the adapter's to_dict()"
        ) from None


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


Places = Root | Sequence[Root] | CheckpointStore | None
"""The `store` argument of a Healer."""


def checked_places(given: Any) -> Any:
    """Checks the `store` argument of a Healer.

    Args:
        given: what the user has passed.

    Returns:
        A directory, a tuple of directories, a store or None.

    Raises:
        ValueError: the argument is of another type, or names a directory twice.
    """
    if given is None or isinstance(given, CheckpointStore):
        return given
    if isinstance(given, list | tuple):
        places = tuple(given)
    else:
        places = (given,)
    are_paths = [isinstance(each, str | os.PathLike) and bool(os.fspath(each)) for each in places]
    if not are_paths or not all(are_paths):
        raise ValueError(
            "store is a path, a list of paths, a store or None, as in "
            f'store=["/local/run", "/shared/run"], not {given!r}'
        )
    if len({Path(each).resolve() for each in places}) < len(places):
        raise ValueError(f"the directories of a list are different ones, and here {given!r}")
    first, *others = places
    if others:
        return places
    return first
