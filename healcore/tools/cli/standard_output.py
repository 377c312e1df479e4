"""Standard output that may be closed, full, or know only ASCII: none of it changes a verdict.

An exit status means something here (`probe` says WARN with 1), and click gives 1 to a pipe whose
reader has seen enough.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator


class _Patient(io.RawIOBase):
    """Standard output whose reader may leave (`| head`): the rest goes nowhere."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._handle

    def isatty(self) -> bool:
        return os.isatty(self._handle)

    def write(self, data: object) -> int:
        view = memoryview(data)  # type: ignore[arg-type]
        try:
            return os.write(self._handle, view)
        except BrokenPipeError:
            return view.nbytes


@contextlib.contextmanager
def prepared(*, patient: bool) -> Iterator[None]:
    """Standard output and error, made fit for anything that a command prints.

    Args:
        patient: go on when nobody reads any more. A long stream had better end there instead.

    Raises:
        SystemExit: standard output could not be written; with the status of a command line that
            could not be carried out, after a line on standard error.
    """
    if sys.stdout is None:  # closed by the caller: `>&-`
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    before = sys.stdout
    if patient and isinstance(before, io.TextIOWrapper) and _is_pipe(before):
        before.flush()
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Patient(before.fileno())),
            encoding=before.encoding,
            errors="backslashreplace",
        )
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        _give_up()
        raise
    except OSError as error:
        if error.filename is None and isinstance(sys.stdout, io.TextIOWrapper):
            _give_up()
            why = error.strerror or error
            print(f"standard output cannot be written: {why}", file=sys.stderr)
            raise SystemExit(3 if "probe" in sys.argv[1:2] else 2) from None
        raise


def _is_pipe(stream: io.TextIOWrapper) -> bool:
    try:
        return not os.isatty(stream.fileno())
    except (OSError, ValueError):
        return False


def _give_up() -> None:
    """What is still in the buffer goes nowhere; Python would complain once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
