"""Replays one policy over one recorded trace.

A replay cannot restore a checkpoint. Where a rollback is due, the replay reports the rollback and
continues along the recorded curve. The engine's state is restored only where the recorded run was
resumed or rolled back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.core.verdict import Action, Cause, names
from healcore.history import Incident
from healcore.policy import PolicyLike
from healcore.runtime.host_policy import HostPolicy
from healcore.tools.replay.judged import ALWAYS_PASSED, JudgedRows, judge
from healcore.tools.replay.summary import Summary, find_incidents, shortest, summarize
from healcore.tools.traces import Trace


class ReplayError(HealcoreError, ValueError):
    """A policy cannot be replayed on a trace. The message has the reason and the remedy."""


class Decided(NamedTuple):
    """One row with the decision of the policy. Observe mode has the same decisions."""

    index: int
    step: float
    cause: Cause
    action: Action
    """Orders to the host, with ROLLBACK if a rollback was due."""
    skip: bool
    grad_scale: float
    lr_scale: float
    z: dict[str, float]
    """z scores by signal, for signals that the row logs and the policy scores."""
    threshold: float | None
    """Gradient norm above which the row would be clipped, or None for no limit."""
    attempt: int
    spent: bool
    """Whether the budget denied a due rollback. A live run ends here."""


@dataclass(frozen=True, eq=False)
class Replay:
    """A finished replay: an iterable over the rows whose decision is not neutral."""

    trace: Trace
    policy: str
    """Name of the policy."""
    host: HostPolicy
    judged: JudgedRows
    summary: Summary
    incidents: tuple[Incident, ...]

    def __iter__(self) -> Iterator[Decided]:
        judged, record = self.judged, self.judged.record
        action, spent = judged.action, judged.spent
        columns = {name: record[name] for name in record.dtype.names or ()}
        # A score of a row that does not log its signal is the score of an earlier row.
        scores = {}
        config, per_tensor = self.host.engine.config, self.host.engine.per_tensor
        if config.clip is not None and not per_tensor and "grad_norm" in judged.logged:
            scores["grad_norm"] = (record.z, judged.logged["grad_norm"])
        if "loss" in judged.logged and "loss_spike" in dict(config.detectors):
            scores["loss"] = (record.z_loss, judged.logged["loss"])
        for row in np.flatnonzero(judged.decided).tolist():
            z = {name: shortest(values[row]) for name, (values, has) in scores.items() if has[row]}
            yield Decided(
                index=int(judged.index[row]),
                step=float(judged.step[row]),
                cause=Cause(int(columns["cause"][row])),
                action=Action(int(action[row])),
                skip=bool(columns["skip"][row]),
                grad_scale=shortest(columns["grad_scale"][row]),
                lr_scale=shortest(columns["lr_scale"][row]),
                z=z,
                threshold=shortest(columns["threshold"][row]) if "grad_norm" in z else None,
                attempt=int(judged.attempt[row]),
                spent=bool(spent[row]),
            )

    def lines(self) -> Iterator[str]:
        """Yields a line of JSON for each decided row, and a line for the summary."""
        for row in self:
            line = row._asdict() | {"cause": names(row.cause), "action": names(row.action)}
            spent = {"spent": True} if line.pop("spent") else {}
            if row.threshold is None:
                del line["threshold"]
            line["step"] = _number(row.step)
            yield _line({"trace": self.trace.name, **line, "policy": self.policy, **spent})
        fields = {
            name: _number(value) if isinstance(value, float) else value
            for name, value in asdict(self.summary).items()
        }
        steps = self.summary.rows - self.summary.unjudged
        yield _line({"trace": fields.pop("trace"), "summary": True, "steps": steps, **fields})


def _number(number: float) -> float | int:
    return int(number) if number.is_integer() else number


def _line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"


def replay(trace: Trace, policy: PolicyLike | HostPolicy, *, name: str | None = None) -> Replay:
    """Replays a policy over a trace.

    Args:
        trace: from `healcore.tools.traces.open_traces`.
        policy: the name of a preset, a path of a TOML file, a `Policy`, an `Engine` or its config,
            or a `HostPolicy`, which saves time with several traces.
        name: name of the policy in the results, or None for the policy's own name.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
    """
    host = policy if isinstance(policy, HostPolicy) else HostPolicy.of(policy)
    name = name or host.name
    inactive = _find_inactive(host.engine, trace, name)
    judged = judge(host.engine, trace)
    incidents = find_incidents(judged)
    summary = summarize(trace, judged, incidents, name, host.fingerprint or "", inactive)
    return Replay(trace, name, host, judged, summary, tuple(incidents))


def _find_inactive(engine: Engine, trace: Trace, policy: str) -> dict[str, tuple[str, ...]]:
    """Finds the inactive parts of the policy by missing signal.

    Raises ReplayError if the policy has nothing to judge.
    """
    passed = trace.signals & {*ALWAYS_PASSED, *engine.needs}
    parts = [(name, detector.NEEDS) for name, detector in engine.config.detectors]
    if engine.config.clip is not None:
        parts.insert(0, ("clip", {"group_norms" if engine.per_tensor else "grad_norm"}))
    if all(needs - passed for _, needs in parts):
        needed = ", ".join(sorted(engine.needs)) or "nothing"
        raise ReplayError(
            f"{trace.name}: policy {policy} reads {needed}, but this trace logs only "
            f"{', '.join(sorted(passed))}: pass a log with these signals, or another policy"
        )
    missing = sorted({signal for _, needs in parts for signal in needs - passed})
    return {signal: tuple(name for name, needs in parts if signal in needs) for signal in missing}
