"""Whether a policy can say anything about a trace, and what of it rests there, in words."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.core.detectors import DETECTORS
from healcore.core.engine import Engine
from healcore.core.errors import HealcoreError
from healcore.plugins.rows import SignalLayout


class ReplayError(HealcoreError, ValueError):
    """A trace that a policy cannot be replayed on; the message says why and what to do."""

    def __init__(self, trace: str, problem: str) -> None:
        super().__init__(f"{trace}: {problem}")
        self.problem = problem


def resting(
    engine: Engine, layout: SignalLayout, *, trace: str, policy: str
) -> dict[str, tuple[str, ...]]:
    """What of the policy rests because the trace does not log what it reads.

    Args:
        engine: the policy.
        layout: what it is given of the trace.
        trace: its name, for messages.
        policy: its name, for messages.

    Returns:
        The parts that rest, by the signal that is missing.

    Raises:
        ReplayError: no row can be judged, or nothing of the policy is left.
    """
    logged = set(layout.signals)
    if not logged:
        raise ReplayError(
            trace,
            "no row has a loss or a gradient norm, so nothing can be judged; "
            "name the columns that hold them, as in --column loss=NAME --column grad_norm=NAME",
        )
    missing: dict[str, list[str]] = {}
    working = False
    if engine.config.clip is not None:
        kind = engine.config.clip[0]
        if engine.per_tensor:
            missing.setdefault("group_norms", []).append(f"clip {kind}")
        elif "grad_norm" in logged:
            working = True
        else:
            missing.setdefault("grad_norm", []).append(f"clip {kind}")
    for name, _ in engine.config.detectors:
        absent = DETECTORS[name].NEEDS - logged
        working |= not absent
        for signal in absent:
            missing.setdefault(signal, []).append(name)
    if not working:
        wanted = ", ".join(sorted(engine.needs)) or "nothing"
        raise ReplayError(
            trace,
            f"policy {policy} reads {wanted}, and this trace logs only "
            f"{', '.join(sorted(logged))}: there is nothing to judge; take a log that has what the "
            "policy reads, or another policy",
        )
    return {signal: tuple(parts) for signal, parts in sorted(missing.items())}


def sentence(signal: str, parts: Sequence[str]) -> str:
    """What rests for want of one signal, in words."""
    verb = "rests" if len(parts) == 1 else "rest"
    if signal == "group_norms":
        return (
            f"{parts[0]} works on the gradient norm of every tensor, which no log has: it rests, "
            "and no clipping is replayed"
        )
    listed = " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    return f"{listed} {verb}: no {signal} was logged"
