"""`SeveralStores`: the checkpoints of one run in several directories.

One directory may be on a fast local disk, and one on a shared disk. A save copies the state once,
and writes this copy to each directory in turn. So each directory is a whole store, which commands
and later runs can use alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from healcore.runtime.store import manifest
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointDamaged,
    CheckpointNotFound,
    SaveFailed,
    StoreError,
)
from healcore.runtime.store.host_copy import HostCopy
from healcore.runtime.store.store import CheckpointStore

StorePlace = str | os.PathLike[str] | CheckpointStore
"""A directory for checkpoints, or a store."""
Places = StorePlace | Sequence[StorePlace] | None
"""The `store` argument of a Healer."""


def checked_places(given: Any) -> Any:
    """Checks the `store` argument of a Healer.

    Args:
        given: what the user has passed.

    Returns:
        A place, None, or a tuple of at least two places.

    Raises:
        ValueError: the argument is of another type, names a directory twice, or has a store without
            a directory in a list.
    """
    rule = "store is a path, a store, None, or a list of paths and stores"
    if isinstance(given, list | tuple):
        if len(given) == 0:
            raise ValueError(f'{rule}, as in store=["/local/run", "/shared/run"], not {given!r}')
        places = tuple(map(checked_places, given))
        roots = [root_of(each) for each in places]
        if len(places) > 1 and None in roots:
            wrong = given[roots.index(None)]
            raise ValueError(
                f"each store of a list has a directory, and {wrong!r} has none: leave it out. The "
                "newest checkpoints are in host memory too"
            )
        twice = [each for each in roots if each is not None and roots.count(each) > 1]
        if twice:
            raise ValueError(
                f"the stores of a list are different directories, not twice {twice[0]}"
            )
        if len(places) == 1:
            return places[0]
        return places
    is_path = isinstance(given, str | os.PathLike) and os.fspath(given)
    if given is None or is_path or isinstance(given, CheckpointStore):
        return given
    raise ValueError(f'{rule}, as in store="runs/1", not {given!r}')


def root_of(place: Any) -> Path | None:
    """The directory of a place, to compare places with each other.

    Args:
        place: a path, a store, a list of these, or None.

    Returns:
        The real path, of the first place of a list. None without a directory.
    """
    if isinstance(place, list | tuple) and place:
        place = place[0]
    root = place
    if isinstance(place, CheckpointStore):
        root = place.root
    if isinstance(root, str | os.PathLike):
        return Path(root).resolve()
    return None


def _newest_of(records: Mapping[int, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The record with the most attempts, and among equals the record of the largest step."""

    def key(step: int) -> tuple[int, int]:
        return len(AttemptHistory.of(records[step]).starts), step

    return records[max(records, key=key)]


class SeveralStores(CheckpointStore):
    """One store that writes each checkpoint to several directories.

    - A save that fails in one directory is reported, and written to the other directories.
    - A restore takes the first directory whose checkpoint of the step is intact. The newest
      checkpoint of the run counts, in whichever directory it is.
    - `root` is the first directory. A run writes its events and metrics there.

    Copies in host memory are in the first store that keeps any.

    Args:
        stores: stores with a directory each, of one framework, in the order of preference.

    Raises:
        StoreError: the stores have different formats.
    """

    root: Path

    def __init__(self, stores: Sequence[CheckpointStore]) -> None:
        first = stores[0]
        for other in stores:
            if other.format.name != first.format.name:
                raise StoreError(
                    f"the stores of a list have one format, and {first.root} is "
                    f'"{first.format.name}", {other.root} is "{other.format.name}": pass stores '
                    "of one framework"
                )
        super().__init__(first.format, first.root, keep=None, ranks=first.ranks)
        self.ring = first.ring
        for each in stores:
            if each.ring.keep:
                self.ring = each.ring
                break
        patterns = chain.from_iterable(each.nonfinite_ok for each in stores)
        self.nonfinite_ok = tuple(dict.fromkeys(patterns))
        self.stores = tuple(stores)
        self._undeletable: set[Path] = set()
        """Checkpoints that could not be deleted. They are not listed: otherwise they would count
        among the checkpoints to keep, and other checkpoints would be deleted in the directories
        that can delete."""

    @property
    def directories(self) -> int:
        """Number of directories, each of which has all checkpoints."""
        return len(self.stores)

    @property
    def place(self) -> str:
        """The directories, for messages."""
        return " and ".join(str(each.root) for each in self.stores)

    def check_run(self) -> None:
        """Checks that all directories are of one run, before any is read or written.

        A restore would otherwise mix the checkpoints of two runs, and a save would delete some.

        Raises:
            StoreError: two directories have checkpoints of different runs.
        """
        runs: dict[str, Path | None] = {}
        for store in self.stores:
            records: Mapping[int, Mapping[str, Any]] = {}
            try:
                records = manifest.scan(store.root).records
            except StoreError as error:
                self._report_scan(error, "the other directories are used")
            if records:
                run = str(_newest_of(records).get("run", ""))
                runs.setdefault(run, store.root)
        if len(runs) > 1:
            named = ", ".join(f"{root} has run {run}" for run, root in runs.items())
            raise StoreError(
                f"the directories of a list are of one run, and here {named}: nothing was read. "
                "Pass the directories of one run, or an empty directory in place of the other"
            )

    def delete(self, step: int) -> None:
        """Removes a checkpoint from each directory, also an older save of its step.

        A directory that cannot delete is reported once. Its checkpoints stay, and the other
        directories still delete.

        Raises:
            CheckpointNotFound: the step has no checkpoint.
            StoreError: no directory can delete.
        """
        _, stored = self._locate(step)
        self.ring.forget(step)
        failures: dict[Path | None, StoreError] = {}
        for each in self.stores:
            try:
                each.delete(step)
            except (CheckpointNotFound, CheckpointDamaged):
                continue
            except StoreError as error:
                failures[each.root] = error
                self._undeletable |= {s.folder for s in stored if s.folder.parent == each.root}
        if len(failures) == len(self.stores):
            raise next(iter(failures.values()))
        for root, error in failures.items():
            self._report_once(f"deletions in {root}", error)

    def _scan(self, step: int | None = None) -> manifest.FoundCheckpoints:
        """The checkpoints of all directories that can be read, see `manifest.merge`."""
        scans, errors = [], []
        for each in self.stores:
            try:
                scans.append(manifest.scan(each.root, step).without(self._undeletable))
            except StoreError as error:
                errors.append(error)
        if not scans:
            raise errors[0]
        for error in errors:
            self._report_scan(error, "the other directories are used")
        return manifest.merge(scans)

    def _write_checkpoint(self, root: Path, copy: HostCopy) -> Path:
        """Writes a checkpoint to each directory; returns the first folder. Every rank calls it.

        Raises SaveFailed if no directory has it.
        """
        written, failures = [], []
        for each in self.stores:
            assert each.root is not None
            try:
                written.append(each._write_checkpoint(each.root, copy))
                self._undeletable.discard(written[-1])
            except SaveFailed as failure:
                failures.append(failure)
        if not written:
            self._failures += failures[1:]
            raise failures[0]
        elsewhere = str(written[0].parent)
        self._failures += [replace(failure, elsewhere=elsewhere) for failure in failures]
        return written[0]
