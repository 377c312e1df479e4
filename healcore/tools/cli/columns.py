"""`--column loss=NAME`: what a signal is called in the files, where it has a name of its own."""

from __future__ import annotations

from collections.abc import Iterable


def columns_of(pairs: Iterable[str]) -> dict[str, str]:
    """Signal -> name.

    Raises:
        TraceError: a pair is not of the form SIGNAL=NAME.
    """
    from healcore.tools.traces import TraceError

    columns = {}
    for pair in pairs:
        signal, equals, name = pair.partition("=")
        if not (signal and equals and name):
            raise TraceError(f"--column must be SIGNAL=NAME, as in loss=train/ce, got {pair!r}")
        columns[signal] = name
    return columns
