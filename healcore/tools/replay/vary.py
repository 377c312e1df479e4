"""Replays variants of one policy (`--vary KEY=A,B,C`), and counts what each would have done."""

from __future__ import annotations

import functools
import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from healcore.core.errors import HealcoreError
from healcore.policy import Policy, PolicyError, load
from healcore.policy.loader import merged
from healcore.runtime.host_policy import HostPolicy
from healcore.tools.replay.replayed import ReplayError, replay
from healcore.tools.replay.scores import Label, Score, label_of, score_replay
from healcore.tools.traces import Trace

MAX_VARIANTS = 100
"""A larger table is not read, and the best of many settings is the best by chance."""
_COUNTS = ("rows", "alarms", "incidents", "rollbacks", "skips", "clips")


class VaryError(HealcoreError, ValueError):
    """An option `--vary` cannot be used. The message has the received value and the rule."""


def variants(policy: Policy, vary: Sequence[str]) -> dict[str, Policy]:
    """All combinations of the values of `vary`.

    Args:
        policy: the base policy.
        vary: options `KEY=A,B,C` with the dotted keys of a policy file.

    Returns:
        The settings as text -> the policy with them. The first is the base policy, by its name.

    Raises:
        VaryError: an option has another form, the policy rejects a value, or there are more than
            `MAX_VARIANTS` combinations.
    """
    axes = [_parse(text) for text in vary]
    count = math.prod(map(len, axes))
    if count > MAX_VARIANTS:
        raise VaryError(f"--vary makes {count:,} variants; at most {MAX_VARIANTS} are compared")
    found = {policy.name: policy}
    for settings in itertools.product(*axes):
        overrides: dict[str, Any] = functools.reduce(merged, map(tomllib.loads, settings), {})
        name = " ".join(settings)
        try:
            found[name] = load(policy, **overrides)
        except PolicyError as error:
            raise VaryError(f"--vary {name}: {error}") from None
    return found


def _parse(text: str) -> list[str]:
    """The settings `KEY=VALUE` of one option, each a line of TOML."""
    key, _, values = text.partition("=")
    settings = [f"{key.strip()}={value.strip()}" for value in values.split(",")]
    try:
        for setting in settings:
            tomllib.loads(setting)
    except ValueError as error:
        raise VaryError(f"--vary {text!r}: write KEY=A,B,C with numbers ({error})") from None
    return list(dict.fromkeys(settings))


def count_variants(
    traces: Sequence[Trace],
    policies: Mapping[str, Policy],
    labels: Sequence[Label],
    problems: list[str],
) -> Iterator[dict[str, Any]]:
    """Yields the sums of each variant over the traces; adds to `problems` for the other traces.

    With labels also `events`, `found`, `in_time`, `latency` (median, rows) and `false` (alarms).
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
        row |= {key: sum(getattr(each, key) for each in summaries) for key in _COUNTS}
        row["rollbacks"] -= sum(each.repeats for each in summaries)
        if scores:
            total = functools.reduce(Score.plus, scores)
            row |= {"events": total.events, "found": len(total.latencies), "in_time": total.in_time}
            row["latency"] = float(np.median(total.latencies)) if total.latencies else None
            row["false"] = total.false
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
        table.add_row(
            Text(row["variant"]),
            *("-" if row[name] is None else f"{row[name]:,}" for name in names),
        )
    return table
