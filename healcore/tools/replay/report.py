"""Builds the report of a replay."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from healcore.history import Counts, Curves, Mode
from healcore.history.curves import thinned
from healcore.history.incident import MOST_ALARMS
from healcore.history.run import RunAttempt
from healcore.tools.replay.replayed import Replay, inactive_line
from healcore.tools.report.run_report import RunReport, first_lines


def replay_report(result: Replay) -> RunReport:
    """Returns the report of a replay."""
    summary, trace, judged = result.summary, result.trace, result.judged
    record = judged.record
    alarms = np.flatnonzero((record.cause != 0) & ~record.incident_open & ~record.skip)
    shown = judged.step[alarms[:MOST_ALARMS]].tolist()
    notes = [inactive_line(*each) for each in summary.inactive.items()]
    if len(alarms) > len(shown):
        more = f"the plot marks the first {len(shown)}"
        notes.append(f"{len(alarms):,} alarms outside of incidents: {more}")
    return RunReport(
        title=summary.trace,
        mode=Mode.REPLAY,
        policy_name=summary.policy,
        policy_toml=result.host.text or "",
        fingerprint=summary.fingerprint,
        curves=_curves(result),
        incidents=result.incidents,
        counts=Counts(
            incidents=summary.incidents,
            rollbacks=summary.first_rollbacks,
            skips=summary.skips,
            clips=summary.clips,
            alarms=summary.alarms,
        ),
        # The fields of the summary's line of JSON, by the same names.
        facts={name: str(value) for name, value in asdict(summary).items() if value},
        notes=(*notes, *first_lines("not read", trace.problems), *trace.notes),
        attempts=tuple(
            RunAttempt(attempt.number, attempt.first_step, attempt.source or "recorded")
            for attempt in trace.attempts
        ),
        alarms_outside=tuple(shown),
        stop=summary.stopped_step,
    )


def _curves(result: Replay) -> Curves:
    rows, judged = result.trace.rows, result.judged
    threshold, lr_scale = np.full((2, len(rows.step)), np.nan, np.float32)
    threshold[judged.index] = np.where(
        judged.record.threshold == 0, np.nan, judged.record.threshold
    )
    lr_scale[judged.index] = judged.record.lr_scale
    nonfinite = np.zeros(len(rows.step), bool)
    for name in ("loss", "grad_norm"):
        if name in rows.values:
            nonfinite |= rows.logged[name] & ~np.isfinite(rows.values[name])
    return thinned(
        Curves(
            step=rows.step,
            loss=rows.values.get("loss", np.full(len(rows.step), np.nan, np.float32)),
            grad_norm=rows.values.get("grad_norm"),
            threshold=threshold,  # a threshold of 0 means no limit
            lr_scale=lr_scale,
            attempt=rows.attempt,
            nonfinite=nonfinite,
        )
    )
