"""`healcore events schema | show` and `healcore watch`: the events of a run.

Exit status of `events`: 0 success, 1 `show` found damaged lines in the file, 2 it could not be
read. Of `watch`: 0 the run has completed (with `--once`: or is running), 1 it ended in any other
way, 2 the file cannot be read or is no events file, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from healcore.tools.cli.options import fail
from healcore.tools.terminal import console, echo, echo_json

OK, DAMAGED, INTERRUPTED = 0, 1, 130

app = typer.Typer(no_args_is_help=True, help="Look at the events of a run.")


@app.command("schema")
def schema_(
    metrics: Annotated[
        bool, typer.Option("--metrics", help="The schema of a metrics file instead.")
    ] = False,
) -> None:
    """The JSON Schema of one line of an events file."""
    from healcore.events import schema  # builds the models, which `show` does without

    found = schema.metrics_schema() if metrics else schema.json_schema()
    echo_json(json.dumps(found, indent=2))


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The events file of a run.")],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only events of this kind; may be repeated.")
    ] = None,
) -> None:
    """One line per event: when, at which step, what. Damaged lines go to standard error."""
    from healcore.events import read

    try:
        history = read(file)
    except OSError as error:
        fail(f"{file} cannot be read: {error.strerror or error}")
    run = None
    for event in history.events:
        if kind and event["kind"] not in kind:
            continue
        if event["run"] != run:
            run = event["run"]
            echo(f"run {run}")
        echo(_line(event))
    for problem in history.problems:
        echo(f"line {problem.line}: {problem.problem}", err=True)
    raise typer.Exit(DAMAGED if history.problems else OK)


def _line(event: dict[str, Any]) -> str:
    from healcore.runtime.postmortem.sentences import sentence_and_fields

    sentence, others = sentence_and_fields(event)
    step = "-" if event.get("step") is None else event["step"]
    fields = (f"{name}={_short(value)}" for name, value in others.items())
    said = f"{_short(sentence, 300)}  " if sentence else ""
    when = str(event.get("time", ""))[:19]
    return f"{when:19}  {step:>9}  {event['kind']:15}  {said}{' '.join(fields)}".rstrip()


def _short(value: Any, most: int = 100) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split())
    return text if len(text) <= most else f"{text[: most - 3]}..."


def watch(
    events: Annotated[
        Path,
        typer.Argument(
            metavar="EVENTS", help="The events file of a run; it need not be there yet."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the present state and exit.")] = False,
    forever: Annotated[
        bool, typer.Option("--forever", help="Go on after the run's end; it may be started again.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option("--policy", "-p", help="The run's policy file, unless it used a preset."),
    ] = None,
) -> None:
    """Follows a run in the terminal: its state, and incidents as they happen."""
    from healcore.policy import PolicyError, load
    from healcore.tools.report.runs import ReportError
    from healcore.tools.watch.follow import WatchError, follow, print_once

    printer = console(highlight=False)
    try:
        given = None if policy is None else load(policy)
        path = _events_file(events)
        if once:
            status = print_once(path, given, printer)
        else:
            status = follow(path, given, printer, forever=forever)
    except (PolicyError, ReportError, WatchError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(status)


def _events_file(events: Path) -> Path:
    """The events file: the given file, or the file in a folder that a Healer writes there."""
    from healcore.tools.report.runs import find_events

    if events.is_dir() and not any(events.glob("*events.jsonl")):
        return events / "healcore.events.jsonl"
    return find_events(events)
