"""What a power failure may leave on a disk, from the order in which a program has changed it.

`Recorder` looks at a directory after each fsync, rename, removal and new directory of this process.
From these looks follow the states that a disk may be in after a power failure, in two models:

- The *strict* model has what POSIX promises, and nothing else. The content of a file is on disk as
  it was at its last fsync, and the names in a directory as they were at the directory's own last
  fsync. Anything newer may be there or not, each file and directory by itself.
- The *journal* model is a file system with a journal, such as ext4: names and directories change on
  disk in the order in which the program has changed them, and each fsync writes all of them. The
  content of a file that had no fsync may be empty.
"""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Node = tuple[int, int]
"""Number of an inode, and how often the number had been used for another file before."""
_CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


class Look(NamedTuple):
    """What is in the directory after one change."""

    folders: dict[Node, dict[str, Node]]
    """Each directory's names."""
    contents: dict[Node, bytes]
    synced: Node | None
    """The file or directory that the change was an fsync of, or None."""


class Recorder:
    """The changes of a directory, which exists before them."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.looks: list[Look] = []
        self._files: set[Node] = set()
        self._used: dict[int, int] = {}
        self._alive: set[int] = set()
        self._lock = threading.RLock()
        self.root = self._look(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Looks at the directory after each change within the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            yield

    def _watched(self, name: str, call: Any) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            with self._lock:
                result = call(*args, **options)
                synced = os.fstat(args[0]).st_ino if name == "fsync" else None
                self._look(synced)
                return result

        return watched

    def _look(self, synced: int | None) -> Node:
        folders: dict[Node, dict[str, Node]] = {}
        contents: dict[Node, bytes] = {}
        inodes: set[int] = set()

        def node_of(inode: int) -> Node:
            if inode not in self._alive | inodes:
                self._used[inode] = self._used.get(inode, -1) + 1
            inodes.add(inode)
            return inode, self._used[inode]

        def walk(path: Path) -> Node:
            node = node_of(path.stat().st_ino)
            folders[node] = {}
            for each in os.scandir(path):
                if each.is_dir(follow_symlinks=False):
                    folders[node][each.name] = walk(Path(each.path))
                else:
                    file = node_of(each.inode())
                    folders[node][each.name] = file
                    self._files.add(file)
                    contents[file] = Path(each.path).read_bytes()
            return node

        root = walk(self.base)
        self._alive = inodes
        is_here = synced in inodes
        self.looks.append(
            Look(
                folders,
                contents,
                (synced, self._used[synced]) if synced is not None and is_here else None,
            )
        )
        return root

    def restore(self, look: int, folder: Path, *, model: str, seed: int | None = None) -> None:
        """Makes in a new folder what a failure after a look may leave of the directory.

        Args:
            look: number of the look.
            folder: the new folder.
            model: "strict", "journal", or "none" for a failure of the process alone.
            seed: chooses which of the newer changes are there. Without a seed none are.
        """
        chance = None if seed is None else random.Random(seed)
        state = self.looks[look].folders, self.looks[look].contents
        if model == "journal":
            state = self._journal(look, chance)
        elif model == "strict":
            state = self._strict(look, chance)
        self._write(folder, self.root, *state)

    def last_commit(self, look: int) -> int | None:
        """Number of the last look up to this one at which a checkpoint's name was on disk."""
        for number in reversed(range(look + 1)):
            each = self.looks[number]
            names = each.folders.get(each.synced, {}) if each.synced else {}
            if any(name.startswith("step-") for name in names):
                return number
        return None

    def _journal(self, look: int, chance: random.Random | None) -> Any:
        synced = [number for number in range(look + 1) if self.looks[number].synced]
        first = max(synced, default=0)
        at = first if chance is None else chance.randint(first, look)
        contents = {}
        for node, now in self.looks[at].contents.items():
            old = self._synced_content(node, look)
            contents[node] = now if chance is not None and chance.random() < 0.5 else old
        return self.looks[at].folders, contents

    def _strict(self, look: int, chance: random.Random | None) -> Any:
        folders: dict[Node, dict[str, Node]] = {}
        contents: dict[Node, bytes] = {}
        for number, each in enumerate(self.looks[: look + 1]):
            for now, found in ((each.folders, folders), (each.contents, contents)):
                for node, value in now.items():
                    written = chance is not None and chance.random() < 0.1
                    if number == 0 or each.synced == node or written:
                        found[node] = value  # type: ignore[index]
        return folders, contents

    def _synced_content(self, node: Node, look: int) -> bytes:
        for each in reversed(self.looks[: look + 1]):
            if each.synced == node:
                return each.contents[node]
        return self.looks[0].contents.get(node, b"")

    def _write(self, path: Path, node: Node, folders: Any, contents: Any) -> None:
        path.mkdir()
        for name, child in folders.get(node, {}).items():
            if child in self._files:
                (path / name).write_bytes(contents.get(child, b""))
            else:
                self._write(path / name, child, folders, contents)
