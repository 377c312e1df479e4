"""What is known of a run besides its curves and incidents: who, when, with what, and its end."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from healcore import policy as policies
from healcore.history import Run
from healcore.history.process import RunState
from healcore.policy import Policy
from healcore.runtime.events.models import EventRecord
from healcore.runtime.postmortem import postmortem
from healcore.tools.report.words import STATES


class Policies(NamedTuple):
    """The policy of a run, as far as it is known."""

    name: str
    toml: str
    fingerprint: str
    note: str
    """Why there is no text, or why it may be another; empty: all is well."""


def policy_of(start: EventRecord | None, given: Policy | None) -> Policies:
    """The policy: the one that is given, else the one that the run wrote down.

    A preset is shown with its comments, where the run had just that: the fingerprint alone leaves
    out what the host carries out.

    Args:
        start: of the run's last process.
        given: by the user.
    """
    start = start or EventRecord()
    name, ran, written = start.policy or "", start.fingerprint or "", start.policy_toml or ""
    text = "" if given is not None else text_of(name, ran)
    if text and written in ("", policies.dumps(policies.loads(text))):
        return Policies(name, text, ran, "")
    if given is None and written:
        return Policies(name, written, ran, "")
    if given is None:
        note = "The text of the policy is not in the events: pass its file with --policy FILE."
        return Policies(name or "not known", "", ran, note)
    print_ = policies.fingerprint(given)
    note = ""
    if ran and print_ != ran:
        note = (
            f"The policy given with --policy ({given.name}, {print_}) is not the one that the run "
            f"had ({name}, {ran}): it has been edited since, or is another."
        )
    return Policies(name or given.name, policies.dumps(given), ran or print_, note)


def text_of(name: str, print_: str) -> str:
    """The text of a preset or recipe, comments and all; empty: it is no such policy.

    Args:
        name: of the policy.
        print_: its fingerprint, without which it might be an edited one of that name.
    """
    if name not in (*policies.preset_names(), *policies.recipe_names()):
        return ""
    same = policies.fingerprint(policies.load(name)) == print_
    return policies.preset_text(name) if same else ""


def state_of(run: Run, postmortem: dict[str, Any] | None) -> RunState:
    """How the run stands or has ended.

    Args:
        run: its events.
        postmortem: of its last process, which the next one has written if it was killed.
    """
    if run.end is not None or postmortem is None:
        return run.state
    ending = postmortem.get("ending")
    return RunState(ending) if ending in set(RunState) else RunState.ENDED


def facts_of(run: Run, postmortem: dict[str, Any] | None) -> dict[str, str]:
    """Label -> words, in the order in which they are to be read."""
    found, start = postmortem or {}, run.start or EventRecord()
    first = next((each.start for each in run.processes if each.start), None)
    ends = [each.end for each in run.processes if each.end]
    versions = start.environment or {}
    known = {
        "Ending": STATES[state_of(run, postmortem)],
        "Run": ", ".join(each.id for each in run.processes),
        "Framework": _joined(start.framework, versions.get(start.framework or "")),
        "Mode": start.mode,
        "Started": _when(first),
        "Last event": _when(run.processes[-1].last if run.processes else None),
        "Duration": _duration(run),
        "Step at the end": ends[-1].step if ends else found.get("step"),
        "Last known-good": found.get("last_good") if run.last_good is None else run.last_good,
        "Saved every": None if start.save_every is None else f"{start.save_every} steps",
        "Read after": None if start.lag is None else f"{start.lag} steps",
        "Checkpoints": start.store,
        "Host": start.host,
        "Processes": None if start.world == 1 else start.world,
        "healcore": versions.get("healcore"),
        "Python": versions.get("python"),
    }
    return {label: str(value) for label, value in known.items() if value not in (None, "")}


def postmortem_of(path: Path, run: str) -> tuple[dict[str, Any] | None, str]:
    """The postmortem beside an events file, and what is wrong with it, in words."""
    place = postmortem.path_for(path, run)
    try:
        found = postmortem.read(place)
    except FileNotFoundError:
        return None, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, f"{place.name} cannot be read: {type(error).__name__}"
    if not isinstance(found, dict):
        return None, f"{place.name} is no postmortem"
    return found, ""


def _joined(*words: str | None) -> str:
    return " ".join(word for word in words if word)


def _when(event: EventRecord | None) -> str | None:
    if event is None or event.time is None:
        return None
    return f"{event.time[:10]} {event.time[11:19]} UTC"


def _duration(run: Run) -> str | None:
    """Of all processes together, each by its own monotonic clock."""
    each = [one.seconds for one in run.processes if one.seconds is not None]
    if not each:
        return None
    if len(each) == 1:
        return _time(each[0])
    return f"{_time(sum(each))} in {len(each)} processes together; of the last {_time(each[-1])}"


def _time(seconds: float) -> str:
    if not 60 <= seconds < 1e9:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds)))
