"""Checks and writes a command's output files, completely or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from healcore.core.errors import HealcoreError

AnyPath = str | os.PathLike[str]


class OutputError(HealcoreError, ValueError):
    """An output cannot be written. The message has the reason and the remedy."""


def check_outputs(outputs: Iterable[AnyPath], inputs: Iterable[AnyPath]) -> None:
    """Checks that every output can be written and overwrites no input, before the work starts.

    Raises OutputError if an output is a folder, an input or named twice, or if its folder does not
    exist. If an input is a folder, all files in the folder are inputs.
    """
    input_files = [file for path in inputs for file in _log_files(Path(path))]
    seen = set[str]()
    for path in map(Path, outputs):
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path} cannot be written: the folder {path.parent} does not exist")
        if path.is_dir():
            raise OutputError(f"{path} is a folder: name a file in the folder")
        real = os.path.realpath(path)
        if real in seen:
            raise OutputError(f"{path} is the name of two outputs: name two files")
        seen.add(real)
        if _is_any_of(path, input_files):
            raise OutputError(f"{path} is an input: write to another file")


def check_default_path(path: Path) -> None:
    """Raises OutputError if a path that healcore chose exists, but is not a regular file.

    Another user may have created a link there.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OutputError(
            f"{path} is a link or not a regular file, and healcore replaces neither at a default "
            "path: remove it, or name another output"
        )


@contextlib.contextmanager
def replacing(path: AnyPath, *, from_user: bool = True) -> Iterator[Path]:
    """Context manager: the path of a draft, which replaces `path` if the block raises no error.

    Args:
        path: the output.
        from_user: whether the user named the path. True follows a link, and writes directly to a
            device or a pipe. False replaces only a regular file, because another user may have
            created a link.

    Raises:
        OutputError: `path` cannot be written.
    """
    target = Path(path)
    if not from_user:
        check_default_path(target)
    direct = from_user and target.exists() and not target.is_file()
    # `realpath`, so that the file is replaced instead of a link to it.
    real = Path(os.path.realpath(target)) if from_user else target
    try:
        if direct:
            yield target
            return
        # The folder has an unpredictable name, so that no other user can create a link in it.
        with tempfile.TemporaryDirectory(
            prefix=".healcore-", dir=real.parent, ignore_cleanup_errors=True
        ) as folder:
            draft = Path(folder, real.name)  # matplotlib derives the format from the suffix
            yield draft
            draft.replace(real)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{target} cannot be written: {why}; name another file") from error


def _log_files(path: Path) -> Iterator[Path]:
    """Iterates over the files of a directory except pages and pictures, or over one file."""
    if not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names if not name.endswith((".html", ".png")))


def _is_any_of(path: Path, others: Iterable[Path]) -> bool:
    if not path.exists():
        return False
    for other in others:
        with contextlib.suppress(OSError):
            if path.samefile(other) and path.is_file():
                return True
    return False
