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

    Raises OutputError if an output is a folder or an input, or if its folder does not exist. All
    files in a folder that is an input are inputs, except pages and pictures.
    """
    folders = list(map(Path, inputs))
    for path in map(Path, outputs):
        if not path.absolute().parent.is_dir():
            raise OutputError(f"{path} cannot be written: the folder {path.parent} does not exist")
        if path.is_dir():
            raise OutputError(f"{path} is a folder: name a file in the folder")
        real = path.resolve()
        written = path.is_file() and path.suffix not in (".html", ".png")
        for each in map(Path.resolve, folders):
            if real == each or (written and real.is_relative_to(each)):
                raise OutputError(f"{path} is an input: write to another file")


@contextlib.contextmanager
def replacing(path: AnyPath) -> Iterator[Path]:
    """Context manager: the path of a draft, which replaces `path` if the block raises no error.

    A device or a pipe is written directly. A link is replaced, because another user may have
    created it.

    Raises:
        OutputError: `path` cannot be written.
    """
    target = Path(path)
    try:
        if target.exists() and not target.is_file():
            yield target
            return
        # The folder has an unpredictable name, so that no other user can create a link in it.
        with tempfile.TemporaryDirectory(
            prefix=".healcore-", dir=target.parent, ignore_cleanup_errors=True
        ) as folder:
            draft = Path(folder, target.name)  # matplotlib derives the format from the suffix
            yield draft
            draft.replace(target)
    except OSError as error:
        why = error.strerror or error
        raise OutputError(f"{target} cannot be written: {why}; name another file") from error
