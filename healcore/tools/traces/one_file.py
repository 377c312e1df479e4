"""One file: its kind, its reader, and whether there is anything in it."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from healcore.tools.traces import dialects, document, jsonl, tensorboard_file
from healcore.tools.traces.batch import Reader
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.header import read_header, runs_of
from healcore.tools.traces.kinds import DOCUMENT, KNOWN, TABLE, TENSORBOARD, kind_of
from healcore.tools.traces.names import resolve
from healcore.tools.traces.records import PROBE, Objects, RecordReader
from healcore.tools.traces.table import TableReader
from healcore.tools.traces.text import head, is_compressed
from healcore.tools.traces.trace import JUDGED, TraceError


class Opened(NamedTuple):
    """One run of one file, ready to be read."""

    run: str | None
    """Which run of an export of several, which optimizer of several."""
    reader: Reader
    notes: list[str]


class Asked(NamedTuple):
    """What the caller wants to be read."""

    columns: Mapping[str, str]
    extras: Sequence[str]


def open_file(path: str, asked: Asked) -> list[Opened]:
    """One file. More than one for an export of several runs.

    Raises:
        TraceError: it is empty, of no known kind, or has neither a loss nor a gradient norm.
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise TraceError("it is a pipe or a device, and a log is read twice: save it to a file")
    kind = kind_of(head(path))
    if kind == TABLE:
        return _open_table(path, asked)
    if kind == dialects.METRICS.name:
        engines = _engines(path)
        if len(engines) > 1:
            return [_open_engine(path, engine, asked) for engine in engines]
    reader = RecordReader(
        path, _objects(path, kind), asked.columns, asked.extras, tags=kind == TENSORBOARD
    )
    spoken = next((d for d in dialects.DIALECTS if d.name == kind and d.note), None)
    notes = reader.notes + ([spoken.note] if spoken and spoken.note else [])
    return [Opened(None, reader, notes)]


def _engines(path: str) -> list[str]:
    """The optimizers that our metrics file has lines of, as far as its beginning tells."""
    records = itertools.islice(jsonl.objects(path, Findings()), PROBE)
    return list(dict.fromkeys(str(r["engine"]) for _, r in records if "engine" in r))


def _open_engine(path: str, engine: str, asked: Asked) -> Opened:
    """The lines of one optimizer: each has an engine, and so a run, of its own."""
    objects = _objects(path, dialects.METRICS.name)

    def own(findings: Findings) -> Iterator[tuple[int, dict[str, Any]]]:
        return (each for each in objects(findings) if each[1].get("engine") == engine)

    reader = RecordReader(path, own, asked.columns, asked.extras)
    return Opened(engine, reader, reader.notes)


def _objects(path: str, kind: str) -> Objects:
    if kind == TENSORBOARD:
        tensorboard_file.check_installed()
        if is_compressed(path):
            raise TraceError("it is a compressed TensorBoard event file: unpack it first (gunzip)")
        return lambda findings: tensorboard_file.objects(path, findings)
    if kind == DOCUMENT:
        return lambda findings: dialects.steps(
            document.objects(path, findings), dialects.TRAINER, path, findings
        )
    dialect = next((d for d in dialects.DIALECTS if d.name == kind), dialects.PLAIN)
    return lambda findings: dialects.steps(jsonl.objects(path, findings), dialect, path, findings)


def _open_table(path: str, asked: Asked) -> list[Opened]:
    header = read_header(path)
    runs = runs_of(header.names)
    if len(header.names) == 1 and not asked.columns and header.names[0].lower() != "loss":
        raise TraceError(f"its first line is '{header.names[0][:60]}'. It is not {KNOWN}")
    if runs is None:
        picks, notes = resolve(header.names, asked.columns, asked.extras)
        places = {name: header.names.index(column) for name, column in picks.items()}
        return [Opened(None, TableReader(path, header, places, sparse=False), notes)]
    opened: list[Opened] = []
    reasons: list[str] = []
    for run, metrics in runs.items():
        # --column may give the metric, or the whole title of one run's column.
        own = {s: name.removeprefix(f"{run} - ") for s, name in asked.columns.items()}
        try:
            picks, notes = resolve(list(metrics), own, asked.extras)
        except TraceError as error:
            reasons.append(f"run '{run}': {error}")
            continue
        places = {name: metrics[metric] for name, metric in picks.items()}
        title = run if len(runs) > 1 else None
        reader = TableReader(path, header, places, sparse=len(runs) > 1)
        opened.append(Opened(title, reader, notes))
    if not opened:
        raise TraceError(reasons[0])
    opened[0].notes.extend(reasons)
    return opened


def check_usable(reader: Reader) -> None:
    """Reads up to the first row that can be judged.

    Raises:
        TraceError: there is none.
    """
    findings = Findings()
    rows = 0
    for batch in reader.batches(findings):
        rows += len(batch.line)
        if any(batch.given[name].any() for name in JUDGED & batch.given.keys()):
            return
    if not findings.problem_count:
        none = "it has no rows" if isinstance(reader, TableReader) else "nothing is logged in it"
        why = f"none of its {rows:,} rows logs a loss or a gradient norm" if rows else none
        raise TraceError(f"no usable row: {why}")
    first = findings.problems[0]
    place = "" if first.line is None else f"line {first.line}: "
    count = findings.problem_count
    plural = f"{count:,} problems, the first: " if count > 1 else ""
    raise TraceError(f"no usable row: {plural}{place}{first.problem}")
