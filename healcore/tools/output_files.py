"""Writes a command's output files: never over an input, and completely or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from healcore.core.errors import HealcoreError

Name = str | os.PathLike[str]


class OutputError(HealcoreError, ValueError):
    """An output that cannot be written; the message has the reason and the remedy."""


def check_outputs(outputs: Iterable[Name], inputs: Iterable[Name]) -> None:
    """Checks before the work that every output can be written and overwrites no input.

    All files in a directory of `inputs` are inputs. Raises OutputError for an output without a
    folder, that is a folder, an input, or named twice.
    """
    read = [path for each in inputs for path in _files(Path(each))]
    taken: dict[str, Path] = {}
    for path in map(Path, outputs):
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path} cannot be written: there is no folder {path.parent}")
        if path.is_dir():
            raise OutputError(f"{path} cannot be written: it is a folder; name a file in it")
        place = os.path.realpath(path)
        if place in taken:
            raise OutputError(f"{path} is to be written twice: give each output a name of its own")
        taken[place] = path
        if _is_one_of(path, read):
            raise OutputError(f"{path} is one of the files that are read: write to another")


def check_chosen(path: Path, *, folder: bool = False) -> None:
    """Raises OutputError unless nothing, or a regular file, is at a path that healcore has chosen.

    With `folder` it is a folder instead of a file. What is there may have been planted.
    """
    there = path.is_dir() if folder else path.is_file()
    if path.is_symlink() or (path.exists() and not there):
        raise OutputError(
            f"{path} is a link, a pipe or a device, or no {'folder' if folder else 'file'}, and "
            "healcore writes only to regular ones at a path that it has chosen itself: remove it, "
            "or name the output"
        )


@contextlib.contextmanager
def replacing(path: Name, *, named: bool = True) -> Iterator[Path]:
    """A draft that replaces `path` if the block ends without an error; OutputError names the path.

    The old file stays until then. If the user has `named` the path, a link there is followed, and a
    device or a pipe is written to directly. A path that healcore chose may have been planted: only
    a regular file is replaced there.
    """
    target = Path(path)
    if not named:
        check_chosen(target)
    direct = named and target.exists() and not target.is_file()
    # Through a link the file itself is replaced, not the link.
    place = Path(os.path.realpath(target)) if named else target
    try:
        if direct:
            yield target
            return
        # The folder has an unpredictable name: a link planted at the draft's path would send its
        # content into another file.
        with tempfile.TemporaryDirectory(
            prefix=".healcore-", dir=place.parent, ignore_cleanup_errors=True
        ) as own:
            draft = Path(own, place.name)  # matplotlib takes the format from the suffix
            yield draft
            draft.replace(place)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{target} cannot be written: {why}; name another file") from error


def _files(path: Path) -> Iterator[Path]:
    """A file, or the files of a directory that may be logs: all but pages and pictures."""
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names if not name.endswith((".html", ".png")))


def _is_one_of(path: Path, others: Iterable[Path]) -> bool:
    if not path.exists():
        return False
    for other in others:
        with contextlib.suppress(OSError):
            if path.samefile(other) and path.is_file():
                return True
    return False
