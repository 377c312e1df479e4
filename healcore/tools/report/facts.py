"""What is known of a run besides its curves and incidents: who, when, with what, and its end."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from healcore import policy as policies
from healcore.policy import Policy
from healcore.runtime.events.process import Process
from healcore.runtime.events.reading import Event
from healcore.runtime.postmortem import postmortem

_ENDINGS = {
    "completed": "completed",
    "stopped": "stopped by the policy",
    "exception": "ended by an exception",
    "signal": "ended by a signal",
    "interrupted": "interrupted from the keyboard",
    "killed": "killed",
}


class Policies(NamedTuple):
    """The policy of a run, as far as it is known."""

    name: str
    toml: str
    fingerprint: str
    note: str
    """Why there is no text, or why it may be another; empty: all is well."""


def policy_of(events: Sequence[Event], given: Policy | None) -> Policies:
    """The policy: the one that is given, else the one that the run wrote down.

    A preset is shown with its comments, where the run had just that: the fingerprint alone leaves
    out what the host carries out.

    Args:
        events: of the run.
        given: by the user.
    """
    start: Event = next((e for e in reversed(events) if e["kind"] == "start"), {})
    name, ran = start.get("policy", ""), start.get("fingerprint", "")
    text = "" if given is not None else text_of(name, ran)
    written = str(start.get("policy_toml") or "")
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


def ending_of(events: Sequence[Event], died: dict[str, Any] | None) -> str:
    """How the last process ended, in words.

    Args:
        events: of the run.
        died: the last process's postmortem.
    """
    last = next((e for e in reversed(events) if e["kind"] in ("start", "end")), None)
    if last is not None and last["kind"] == "end":
        ending = str(last.get("ending", "not told"))
        return _ENDINGS.get(ending, ending)
    if died is not None:
        return _ENDINGS.get(str(died.get("ending")), str(died.get("ending")))
    start = last or {}
    if "host" in start and "pid" in start:
        process = Process(start["host"], start["pid"], start.get("boot"), start.get("born"))
        gone = process.gone()
        if gone is not None:
            return "killed: it told no end, and its process is gone" if gone else "still running"
    return "not told: still running, or killed"


def facts_of(events: Sequence[Event], died: dict[str, Any] | None) -> dict[str, str]:
    """Label -> words, in the order in which they are to be read."""
    starts = [e for e in events if e["kind"] == "start"]
    start = starts[-1] if starts else {}
    end: Event = next((e for e in reversed(events) if e["kind"] == "end"), {})
    runs = list(dict.fromkeys(e["run"] for e in events))
    good = [e["last_good"] for e in events if "last_good" in e]
    versions = start.get("environment", {})
    known = {
        "Ending": ending_of(events, died),
        "Run": ", ".join(runs),
        "Framework": _joined(start.get("framework"), versions.get(start.get("framework", ""))),
        "Mode": start.get("mode"),
        "Started": _when(starts[0].get("time") if starts else None),
        "Last event": _when(events[-1].get("time") if events else None),
        "Duration": _duration(events),
        "Step at the end": end.get("step", (died or {}).get("step")),
        "Last known-good": good[-1] if good else (died or {}).get("last_good"),
        "Saved every": f"{start['save_every']} steps" if "save_every" in start else None,
        "Read after": f"{start['lag']} steps" if "lag" in start else None,
        "Checkpoints": start.get("store"),
        "Host": start.get("host"),
        "Processes": start.get("world") if start.get("world", 1) != 1 else None,
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


def _when(time: str | None) -> str | None:
    return None if time is None else f"{time[:10]} {time[11:19]} UTC"


def _duration(events: Sequence[Event]) -> str | None:
    """Of all processes together, each by its own monotonic clock."""
    spans: dict[str, list[float]] = {}
    for event in events:
        if "mono" in event:
            spans.setdefault(event["run"], []).append(float(event["mono"]))
    if not spans:
        return None
    each = [max(times) - min(times) for times in spans.values()]
    if len(each) == 1:
        return _time(each[0])
    return f"{_time(sum(each))} in {len(each)} processes together; of the last {_time(each[-1])}"


def _time(seconds: float) -> str:
    if not 60 <= seconds < 1e9:
        return f"{seconds:.1f} s"
    return str(timedelta(seconds=round(seconds)))
