"""From the paths on a command line to traces."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from healcore.tools.traces.batch import Reader
from healcore.tools.traces.directory import NoLog, apart, folders, members
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.names import check_columns, listed
from healcore.tools.traces.one_file import Asked, check_usable, open_file
from healcore.tools.traces.survey import survey
from healcore.tools.traces.trace import Problem, Rows, Trace, TraceError, Unreadable
from healcore.tools.traces.weave import Woven, weave


def open_traces(
    paths: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    join: bool = False,
    extras: Sequence[str] = (),
) -> tuple[list[Trace], list[Unreadable]]:
    """Opens the logs of runs.

    Args:
        paths: files, or directories. Files of a directory that go on from each other, in the
            order of their names, are one run; one that begins anew is a run of its own, and a
            directory of directories is all of them.
        columns: signal (or "step") -> the name it has in the files, where ours is not it.
        join: all paths are attempts of one run, in this order.
        extras: columns or keys that are read besides the signals, by their own names, into
            `Rows.values` ("threshold" of a healcore metrics file); where a file has none there
            are none.

    Returns:
        The traces in the order of the paths, and the paths that gave none.

    Raises:
        TraceError: `columns` names something that is not a signal.
    """
    asked = Asked(columns or {}, tuple(extras))
    check_columns(asked.columns)
    traces: list[Trace] = []
    failed: list[Unreadable] = []
    parts: list[Reader] = []
    told = Findings()
    for path in map(os.fspath, paths):
        try:
            if join:
                parts += _one_run(path, asked, told, failed)
            else:
                traces += _traces(path, asked, failed)
        except TraceError as error:
            failed.append(Unreadable(path, str(error)))
        except OSError as error:
            failed.append(Unreadable(path, f"it cannot be read: {error.strerror or error}"))
        except Exception as error:  # damaged bytes raise anything, and the other paths can be read
            told_of = f"{type(error).__name__}: {str(error)[:200]}"
            failed.append(Unreadable(path, f"it cannot be read ({told_of})"))
    if parts:
        others = len(paths) - 1
        traces.append(
            _trace(os.fspath(paths[0]) + (f" (+{others})" if others else ""), parts, told)
        )
    return traces, failed


def _traces(path: str, asked: Asked, failed: list[Unreadable]) -> list[Trace]:
    if os.path.isdir(path):
        return _of_directory(path, asked, failed)
    traces: list[Trace] = []
    told: list[Findings] = []
    reasons: list[str] = []
    for run, reader, notes in open_file(path, asked):
        try:
            check_usable(reader)
        except TraceError as error:
            reasons += [*notes, str(error) if run is None else f"run '{run}': {error}"]
            continue
        told.append(Findings())
        for note in notes:
            told[-1].note(path, None, note)
        traces.append(_trace(path if run is None else f"{path}#{run}", [reader], told[-1]))
    if not traces:
        raise TraceError(reasons[-1])
    for reason in reasons:  # runs of the file that are not traces are told with the first that is
        told[0].note(path, None, reason)
    return traces


def _of_directory(
    path: str, asked: Asked, failed: list[Unreadable], seen: set[tuple[int, int]] | None = None
) -> list[Trace]:
    """Its runs; where no file of its own can be used, those of the directories in it.

    A directory that links lead to again is read once.
    """
    seen = set() if seen is None else seen
    place = os.stat(path)
    if (place.st_dev, place.st_ino) in seen:
        raise NoLog("it has been read already, by another name")
    seen.add((place.st_dev, place.st_ino))
    told = Findings()
    aside = folders(path)
    try:
        runs = apart(_one_run(path, asked, told, failed))
    except TraceError:
        within: list[Trace] = []
        for folder in aside:
            try:
                within += _of_directory(folder, asked, failed, seen)
            except NoLog:
                continue  # weights, pictures: what a run's directories are full of
            except TraceError as error:
                failed.append(Unreadable(folder, str(error)))
            except OSError as error:
                failed.append(Unreadable(folder, f"it cannot be read: {error.strerror or error}"))
        if not within:
            raise
        return within
    if aside:
        names = listed([os.path.basename(folder) for folder in aside])
        told.note(path, None, f"{names}: not looked into, there are logs beside")
    if len(runs) == 1:
        return [_trace(path, runs[0], told)]
    names = [f"{run[0].path} (+{len(run) - 1})" if len(run) > 1 else run[0].path for run in runs]
    return [
        _trace(name, run, told if run is runs[0] else Findings())
        for name, run in zip(names, runs, strict=True)
    ]


def _one_run(path: str, asked: Asked, told: Findings, failed: list[Unreadable]) -> list[Reader]:
    """The readers of a file or a directory that is (part of) one run."""
    if not os.path.isdir(path):
        opened = open_file(path, asked)
        if len(opened) > 1:
            runs = listed([str(part.run) for part in opened])
            raise TraceError(f"it holds several runs ({runs}), which are not attempts of one")
        check_usable(opened[0].reader)
        for note in opened[0].notes:
            told.note(path, None, note)
        return [opened[0].reader]
    readers: list[Reader] = []
    reasons: list[Problem] = []
    for file in members(path, told, failed):
        try:
            readers += _one_run(file, asked, told, failed)
        except TraceError as error:
            reasons.append(Problem(file, None, str(error)))
        except OSError as error:
            reasons.append(Problem(file, None, f"it cannot be read: {error.strerror or error}"))
    if not readers:
        raise TraceError("; ".join(map(str, reasons)) or "it holds no file of a known kind")
    for reason in reasons:
        told.problem(*reason)
    return readers


def _trace(name: str, readers: Sequence[Reader], told: Findings) -> Trace:
    woven = _guarded(readers)

    def rows() -> Iterator[Rows]:
        return (part.rows for part in woven(Findings()))

    sources = [reader.path for reader in readers]
    return Trace(name, sources, rows, lambda: survey(woven, told))


def _guarded(readers: Sequence[Reader]) -> Callable[[Findings], Iterator[Woven]]:
    """Passes over the files, in which a file that has gone away is an error in words."""

    def woven(findings: Findings) -> Iterator[Woven]:
        try:
            yield from weave(readers, findings)
        except OSError as error:
            where = error.filename or readers[0].path
            raise TraceError(f"{where} cannot be read: {error.strerror or error}") from error

    return woven
