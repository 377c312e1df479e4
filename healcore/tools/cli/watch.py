"""`healcore watch run.events.jsonl`.

Exit status: 0 the run has completed (`--once`: or is under way), 1 it was stopped, killed, or ended
in another way, 2 the file cannot be read or is no events file, 130 after Ctrl-C.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from healcore.tools.terminal import console, say

UNUSABLE, INTERRUPTED = 2, 130


def add_to(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command("watch")(_watch)


def _watch(
    events: Annotated[
        Path,
        typer.Argument(
            metavar="EVENTS", help="The events file of a run; it need not be there yet."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Say how it stands, and end.")] = False,
    forever: Annotated[
        bool, typer.Option("--forever", help="On after the end: the run may be started again.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option("--policy", "-p", help="The run's policy file, if no preset: for its budget."),
    ] = None,
) -> None:
    """Follows a run in the terminal: how it stands, and incidents as they happen."""
    from healcore.policy import PolicyError, load
    from healcore.tools.report.runs import ReportError
    from healcore.tools.watch.follow import WatchError, follow, print_once

    printer = console(highlight=False)
    try:
        given = None if policy is None else load(policy)
        path = _file(events)
        if once:
            status = print_once(path, given, printer)
        else:
            status = follow(path, given, printer, forever=forever)
    except (PolicyError, ReportError, WatchError) as error:
        say(str(error), err=True)
        raise typer.Exit(UNUSABLE) from error
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(status)


def _file(events: Path) -> Path:
    """The events file; in a folder the one there, or the one that a Healer would write."""
    from healcore.tools.report.runs import find_events

    if events.is_dir() and not any(events.glob("*events.jsonl")):
        return events / "healcore.events.jsonl"
    return find_events(events)
