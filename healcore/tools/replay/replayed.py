"""Replays one policy over one recorded trace.

A replay cannot restore a checkpoint. Where a rollback is due, the replay reports the rollback and
continues along the recorded curve. The engine's state is restored only where the recorded run was
resumed or rolled back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.history import Incident
from healcore.policy import PolicyLike
from healcore.runtime.host_policy import HostPolicy
from healcore.tools.replay.decided import Decided, select_decided
from healcore.tools.replay.judged import JudgedRows, judge
from healcore.tools.replay.summary import Summary, find_incidents, summarize
from healcore.tools.traces import Trace


class ReplayError(HealcoreError, ValueError):
    """A policy cannot be replayed on a trace. The message has the reason and the remedy."""

    def __init__(self, trace: str, problem: str) -> None:
        super().__init__(f"{trace}: {problem}")
        self.problem = problem


@dataclass(frozen=True, eq=False)
class Replay:
    """A finished replay: an iterable over the rows whose decision is not neutral."""

    trace: Trace
    policy: str
    engine: Engine
    judged: JudgedRows
    summary: Summary
    incidents: tuple[Incident, ...]
    """The first 1000 incidents, in order."""

    def __iter__(self) -> Iterator[Decided]:
        return select_decided(self.judged, self.engine)


def replay(trace: Trace, policy: PolicyLike, *, name: str | None = None) -> Replay:
    """Replays a policy over a trace.

    Args:
        trace: from `healcore.tools.traces.open_traces`.
        policy: the name of a preset, a path of a TOML file, a `Policy`, an `Engine` or its config.
        name: name of the policy in the results, or None for the policy's own name.

    Raises:
        ReplayError: the policy has nothing to judge in this trace.
        healcore.policy.PolicyError: the policy does not exist or is not valid.
    """
    host = HostPolicy.of(policy)
    name = name or host.name
    inactive = _find_inactive(host.engine, trace, name)
    judged = judge(host.engine, trace)
    incidents = find_incidents(judged)
    summary = summarize(trace, judged, incidents, name, host.fingerprint or "", inactive)
    return Replay(trace, name, host.engine, judged, summary, tuple(incidents[:MAX_INCIDENTS]))


MAX_INCIDENTS = 1000
"""Number of incidents of one replay that are kept for the report; all are counted."""


def _find_inactive(engine: Engine, trace: Trace, policy: str) -> dict[str, tuple[str, ...]]:
    """Finds the inactive parts of the policy by missing signal.

    Raises ReplayError if the policy has nothing to judge.
    """
    passed = trace.signals & ({"loss", "grad_norm"} | set(engine.needs))
    missing: dict[str, list[str]] = {}
    active = False
    if engine.config.clip is not None:
        if engine.per_tensor:
            missing.setdefault("group_norms", []).append("clip")
        elif "grad_norm" in passed:
            active = True
        else:
            missing.setdefault("grad_norm", []).append("clip")
    for name, detector in engine.config.detectors:
        absent = detector.NEEDS - passed
        active |= not absent
        for signal in absent:
            missing.setdefault(signal, []).append(name)
    if not active:
        needed = ", ".join(sorted(engine.needs)) or "nothing"
        raise ReplayError(
            trace.name,
            f"policy {policy} reads {needed}, but this trace logs only "
            f"{', '.join(sorted(passed))}: pass a log with these signals, or another policy",
        )
    return {signal: tuple(parts) for signal, parts in sorted(missing.items())}
