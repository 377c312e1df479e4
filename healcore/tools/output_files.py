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
    exist. If an input is a folder, all files in the folder except pages and pictures are inputs.
    """
    files = [file for path in inputs for file in _log_files(Path(path)) if file.is_file()]
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
        if path.is_file() and any(map(path.samefile, files)):
            raise OutputError(f"{path} is an input: write to another file")


def _log_files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
    for folder, _, names in os.walk(path):
        yield from (Path(folder, name) for name in names if not name.endswith((".html", ".png")))


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
    unusual = target.is_symlink() or (target.exists() and not target.is_file())
    if unusual and not from_user:
        raise OutputError(
            f"{path} is a link or not a regular file, and healcore replaces neither at a default "
            "path: remove it, or name another output"
        )
    # `realpath`, so that the file is replaced instead of a link to it.
    real = Path(os.path.realpath(target))
    try:
        if real.exists() and not real.is_file():
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
