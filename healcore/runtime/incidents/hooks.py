"""Calls the user's hooks: `on_incident` may override an order, and no hook breaks the run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from healcore.core.evidence import Evidence
from healcore.core.step_record import Readings
from healcore.core.verdict import Action, Cause, Decision
from healcore.runtime.faults.failures import Failure, failures_of
from healcore.runtime.store.protocol import Saved

Batch = tuple[int, int]
"""A batch's id: epoch, and index within it. A `BatchId` is one."""


class RunFacts(NamedTuple):
    """The state of the run, read-only: nothing in it refers to the `Healer`."""

    run: str = ""
    """Id of the run, as in its events."""
    policy: str = ""
    observes: bool = False
    """The policy only observes: what a hook returns is not carried out."""
    framework: str = ""
    rank: int = 0
    learning_rate: float | None = None
    """The user's own, without the multiplier, or None if it is unknown."""
    rollbacks: int = 0
    """Carried out so far."""
    last_good: int | None = None
    """Step of the newest known-good checkpoint."""
    checkpoints: tuple[Saved, ...] = ()


class IncidentContext(NamedTuple):
    """One step for which the policy has ordered something; what a hook receives."""

    number: int
    """Counts from 1, over the whole run."""
    step: int
    """The step that was judged, from 0. The loop is `lag` steps ahead of it."""
    onset: int
    """Step of the incident's first alarm."""
    cause: Cause
    decision: Decision
    """The decision as ordered. A hook may override its `action`; the rest has happened."""
    readings: Readings
    engine: str = ""
    """The optimizer's name, if there are several."""
    evidence: tuple[Evidence, ...] = ()
    """Tensors whose gradients were not finite or stood out, the worst first."""
    batches: tuple[Batch, ...] = ()
    """Ids of the step's batches."""
    facts: RunFacts = RunFacts()

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Severity, diagnosis, recipe and references of the causes, errors first."""
        return failures_of(self.cause)

    @property
    def action(self) -> Action:
        """The actions that are ordered."""
        return Action(int(self.decision.action))


Hook = Callable[[IncidentContext], Action | None]
"""Takes the incident and returns the actions to take instead, or None to keep the ordered ones."""

EventHook = Callable[[Mapping[str, Any]], object]
"""Takes the fields of an event, as in the events file. What it returns is ignored."""

_KNOWN = sum(int(action) for action in Action)


class HookResult(NamedTuple):
    """What the hooks returned for one incident."""

    action: Action | None
    """The actions to take instead, or None for the ordered ones."""
    hook: str
    """Name of the hook that returned `action`, or an empty string."""
    problems: tuple[str, ...] = ()
    """One message for each hook that raised or returned something else."""


class Hooks:
    """The user's hooks, in their order.

    Each `on_incident` hook sees in `incident.decision.action` what the hooks before it have
    returned. The last hook to return actions decides. Raises TypeError for a hook that cannot be
    called, or is a coroutine function.
    """

    def __init__(
        self,
        on_incident: Hook | Iterable[Hook] = (),
        *,
        on_saved: EventHook | Iterable[EventHook] = (),
        on_rollback: EventHook | Iterable[EventHook] = (),
    ) -> None:
        takes = "of one IncidentContext that return Action flags or None"
        self._hooks: tuple[Hook, ...] = _functions("on_incident", on_incident, takes)
        takes = "of one event, a mapping"
        self._by_kind: dict[str, tuple[EventHook, ...]] = {
            "save": _functions("on_saved", on_saved, takes),
            "rollback": _functions("on_rollback", on_rollback, takes),
        }

    def __len__(self) -> int:
        return len(self._hooks)

    def run(self, incident: IncidentContext) -> HookResult:
        """Calls every hook; an `Exception` in one changes nothing."""
        action, name, problems = None, "", []
        for hook in self._hooks:
            try:
                returned = _checked(hook(incident))
            except Exception as error:
                problems.append(f"on_incident hook {hook_name(hook)}: {_described(error)}")
                continue
            if returned is not None:
                action, name = returned, hook_name(hook)
                incident = incident._replace(decision=incident.decision._replace(action=returned))
        return HookResult(action, name, tuple(problems))

    def on_event(self, kind: str, fields: Mapping[str, Any]) -> list[str]:
        """Calls the hooks of this kind of event; one message for each hook that raised."""
        problems = []
        for hook in self._by_kind.get(kind, ()):
            try:
                hook({"kind": kind, **fields})
            except Exception as error:
                problems.append(f"hook {hook_name(hook)} for a {kind}: {_described(error)}")
        return problems


def _functions(option: str, given: Any, takes: str) -> tuple[Any, ...]:
    hooks = tuple(given) if isinstance(given, Iterable) else (given,)
    for hook in hooks:
        if not callable(hook) or inspect.iscoroutinefunction(hook):
            raise TypeError(
                f"{option} takes functions {takes}, not {hook!r}: write def hook(...): ..."
            )
    return hooks


def hook_name(hook: Any) -> str:
    """The name of a hook in events."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or '?'}.{name}"


def _checked(returned: Any) -> Action | None:
    if returned is None:
        return None
    # `&` would take a bool or an int for flags: True for ALERT, 3 for ALERT and SAVE.
    if not isinstance(returned, Action) or int(returned) & ~_KNOWN:
        raise TypeError(
            f"returned {returned!r}; a hook returns Action flags (Action.ROLLBACK | Action.CUT_LR, "
            "Action(0) for nothing), or None for what was ordered"
        )
    return returned


def _described(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose __str__ raises
        return type(error).__name__
