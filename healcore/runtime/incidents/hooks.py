"""`on_incident`: a user's functions have a word in what is done, and can break nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from healcore.core.verdict import Action
from healcore.runtime.incidents.incident import Incident

Hook = Callable[[Incident], Action | None]
"""Gets the incident, returns what is to be done instead, or None: as ordered."""

_KNOWN = sum(int(action) for action in Action)


class Answer(NamedTuple):
    """What the hooks said to one incident."""

    action: Action | None
    """What is to be done instead of what was ordered; None: as ordered."""
    by: str
    """Name of the hook that said so, "" if none did."""
    problems: tuple[str, ...] = ()
    """What hooks raised, or returned and may not; in words, for an event each."""


class Hooks:
    """The user's hooks, in their order.

    Each sees in `incident.decision.action` what the ones before it have made of the order; the
    last one to answer is right.

    Args:
        on_incident: one function, or several.

    Raises:
        TypeError: one of them cannot be called, or is a coroutine function.
    """

    def __init__(self, on_incident: Hook | Iterable[Hook] = ()) -> None:
        given = on_incident if isinstance(on_incident, Iterable) else (on_incident,)
        self._hooks: tuple[Hook, ...] = tuple(given)
        for hook in self._hooks:
            if not callable(hook) or inspect.iscoroutinefunction(hook):
                raise TypeError(
                    f"on_incident takes functions of one Incident that return Action flags or "
                    f"None, not {hook!r}: write def hook(incident): ..."
                )

    def __len__(self) -> int:
        return len(self._hooks)

    def ask(self, incident: Incident) -> Answer:
        """Asks every hook.

        An exception in a hook counts as "as ordered". What is meant to end the process
        (KeyboardInterrupt, SystemExit) passes through.
        """
        action, by, problems = None, "", []
        for hook in self._hooks:
            try:
                said = _checked(hook(incident))
            except Exception as error:
                problems.append(f"on_incident hook {name_of(hook)}: {_told(error)}")
                continue
            if said is not None:
                action, by = said, name_of(hook)
                incident = incident._replace(decision=incident.decision._replace(action=said))
        return Answer(action, by, tuple(problems))


def name_of(hook: Any) -> str:
    """What a hook is called in events."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or '?'}.{name}"


def _checked(said: Any) -> Action | None:
    if said is None:
        return None
    # A bool or an int would be taken for flags by `&`: True for ALERT, 3 for ALERT and SAVE.
    if not isinstance(said, Action) or int(said) & ~_KNOWN:
        raise TypeError(
            f"returned {said!r}; a hook returns Action flags (Action.ROLLBACK | Action.CUT_LR, "
            "Action(0) for nothing), or None for what was ordered"
        )
    return said


def _told(error: Exception) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception whose __str__ raises
        return type(error).__name__
