"""Replays variants of one policy (`--vary KEY=A,B,C`), and counts what each would have done.

With labelled events, a variant is scored by the most severe order that its rules can give: recall,
latency, false alarms. An order at row i belongs to an event if onset - 5 <= i <= end + 40. Orders
are ignored in an ambiguous zone (same margins), in the first 64 rows, and within 40 rows after a
non-finite loss. False orders at most 40 rows apart are one false alarm. Traces of fewer than 200
points are too short for a score.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from healcore import regular_file
from healcore.core.decision import Action
from healcore.core.errors import HealcoreError
from healcore.policy import Policy, PolicyError, load
from healcore.policy.loader import parse_overrides
from healcore.runtime.run_options import HostPolicy
from healcore.tools.replay.replayed import Replay, ReplayError, replay
from healcore.tools.replay.table import COUNTS, total
from healcore.tools.traces import Trace

MAX_VARIANTS = 100
"""A larger table is not read, and the best of many settings is the best by chance."""
EARLY_ROWS, LATE_ROWS, IGNORED_ROWS, MIN_ROWS, IN_TIME_ROWS = 5, 40, 64, 200, 10


class VaryError(HealcoreError, ValueError):
    """An option `--vary` or a file of labels cannot be used. The message has the rule."""


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """Returns the base policy by its name, and all combinations of the values by their settings.

    `vary` has options `KEY=A,B,C` with the dotted keys of a policy file. Raises VaryError if an
    option has another form, the policy rejects a value, or there are more than `MAX_VARIANTS`.
    """
    axes: list[list[str]] = []
    for text in vary:
        key, _, values = text.partition("=")
        settings = [f"{key.strip()}={value.strip()}" for value in values.split(",")]
        axes.append(list(dict.fromkeys(settings)))
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        raise VaryError(f"--vary makes {count:,} variants; at most {MAX_VARIANTS} are compared")
    found = {policy.name: policy}
    for settings in itertools.product(*axes):
        name = " ".join(settings)
        try:
            found[name] = load(policy, **parse_overrides(settings, "--vary"))
        except PolicyError as error:
            raise VaryError(f"--vary KEY=A,B,C: {name}: {error}") from None
    return found


def count_variants(
    traces: Sequence[Trace],
    policies: Mapping[str, Policy],
    labels: Sequence[Label],
    problems: list[str],
) -> Iterator[dict[str, Any]]:
    """Yields the sums of each variant over the traces; adds to `problems` for the other traces.

    With labels also `events`, `found`, `in_time` (within 10 rows of the onset), `latency` (median,
    rows) and `false` (alarms).
    """
    for name, policy in policies.items():
        host = HostPolicy.of(policy)
        summaries, scores = [], []
        for trace in traces:
            try:
                result = replay(trace, host, name=name)
            except ReplayError as error:
                problems.append(str(error))
                continue
            summaries.append(result.summary)
            if label := label_of(labels, trace.name):
                scores.append(score_replay(result, label))
        if not summaries:
            continue
        row: dict[str, Any] = {"variant": name, "traces": len(summaries)}
        row |= {key: total(summaries, key) for key in COUNTS}
        row["rollbacks"] -= total(summaries, "repeats")
        if scores:
            latencies = [latency for each in scores for latency in each.latencies]
            row |= {"events": sum(each.events for each in scores), "found": len(latencies)}
            row["in_time"] = sum(latency <= IN_TIME_ROWS for latency in latencies)
            row["latency"] = float(np.median(latencies)) if latencies else None
            row["false"] = sum(each.false for each in scores)
        yield row


def variant_table(rows: Sequence[dict[str, Any]], policy: str) -> Table:
    """A table with a line for each variant."""
    title = Text(f"What variants of {policy} would have done", "bold")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("variant", overflow="fold")
    names = list(rows[0])[3:]  # without the variant, traces and rows
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        cells = ("-" if row[name] is None else f"{row[name]:,}" for name in names)
        table.add_row(Text(row["variant"]), *cells)
    return table


# -- scores against labelled events ----------------------------------------------------------------


class Label(NamedTuple):
    """The labelled events of one trace. A zone is its first and its last row."""

    file: str
    points: int
    spikes: list[tuple[int, int]]
    ambiguous: list[tuple[int, int]]


class Score(NamedTuple):
    """Orders and events of one trace."""

    events: int = 0
    latencies: tuple[int, ...] = ()
    """Rows from the onset to the first order, for each found event."""
    false: int = 0
    """Number of false alarms."""


def score(orders: np.ndarray, nonfinite: np.ndarray, label: Label) -> Score:
    """Compares the orders of one trace with its events; an empty score if the trace is too short.

    `orders` are row numbers, int (n,), `nonfinite` rows without a finite loss, int (m,), both
    increasing.
    """
    if label.points < MIN_ROWS:
        return Score()

    def within(onset: int, end: int) -> np.ndarray:
        return (onset - EARLY_ROWS <= orders) & (orders <= end + LATE_ROWS)

    found = [(onset, orders[within(onset, end)]) for onset, end in label.spikes]
    latencies = tuple(max(int(rows[0]) - onset, 0) for onset, rows in found if rows.size)
    allowed = orders < IGNORED_ROWS
    for zone in (*label.ambiguous, *label.spikes):
        allowed |= within(*zone)
    # The last non-finite loss up to each order.
    last = np.append(-np.inf, nonfinite)[np.searchsorted(nonfinite, orders, side="right")]
    false = orders[~allowed & (orders - last > LATE_ROWS)]
    separate = np.count_nonzero(np.diff(false) > LATE_ROWS) + bool(false.size)
    return Score(len(label.spikes), latencies, int(separate))


def score_replay(replay: Replay, label: Label) -> Score:
    """Scores the most severe order in the policy's rules: rollbacks, stops, skips, else alarms."""
    rows, rules = replay.rows, replay.host.engine.config.rules
    ordered = rows.skip if any(rule.skip for rule in rules) else rows.cause != 0
    for action in (Action.STOP, Action.ROLLBACK):
        if any(rule.action & action for rule in rules):
            ordered = rows.action & int(action) != 0
    loss = replay.trace.rows.values.get("loss", np.zeros(0))
    return score(rows.index[ordered], np.flatnonzero(~np.isfinite(loss)), label)


def label_of(labels: Sequence[Label], trace: str) -> Label | None:
    """Returns the label whose file is the end of the trace's path, or None."""
    parts = Path(trace).absolute().parts  # the user may have passed a relative path
    for label in labels:
        wanted = PurePath(label.file).parts
        if parts[-len(wanted) :] == wanted:
            return label
    return None


def read_labels(path: Path) -> list[Label]:
    """Reads a JSON list of `{"file", "points", "spikes", "ambiguous"}`, or raises VaryError."""
    try:
        return [_label(data) for data in json.loads(regular_file.read(path))]
    except OSError as error:
        raise VaryError(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # damaged content may raise any error
        raise VaryError(
            f'{path} is not a list of labels like [{{"file": "run.csv", "points": 1000, "spikes": '
            f'[{{"onset": 400, "end": 430}}], "ambiguous": []}}]: {type(error).__name__} {error}'
        ) from error


def _label(data: Any) -> Label:
    spikes, ambiguous = (
        [(_row(zone["onset"]), _row(zone["end"])) for zone in data.get(name, ())]
        for name in ("spikes", "ambiguous")
    )
    return Label(str(data["file"]), _row(data["points"]), spikes, ambiguous)


def _row(number: Any) -> int:
    return int(np.int32(int(number)))  # raises OverflowError for a larger number
