"""The commands `healcore events schema | show` and `healcore watch`.

Exit status of `events`: 0 success, 1 `show` found damaged lines, 2 the file could not be read.
Exit status of `watch`: 0 the run completed (with `--once`: or is running), 1 the run ended in
another way, 2 the file cannot be read or is not an events file, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from healcore.tools.cli.options import fail
from healcore.tools.terminal import console, echo, echo_json

OK, DAMAGED, INTERRUPTED = 0, 1, 130

app = typer.Typer(no_args_is_help=True, help="Show the events of a run.")


@app.command("schema")
def schema_(
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Print the schema of a metrics file instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of one line of an events file."""
    from healcore.events import schema  # a local import, because `show` does not need the models

    exported = schema.metrics_schema() if metrics else schema.json_schema()
    echo_json(json.dumps(exported, indent=2))


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The events file of a run.")],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only events of this kind. Repeatable.")
    ] = None,
) -> None:
    """Print a line per event: time, step, kind. Lists damaged lines on standard error."""
    from healcore.events import read

    try:
        history = read(file)
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL character
        fail(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")
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
    step = "-" if event.get("step") is None else _shorten(event["step"], 20)
    fields = (f"{name}={_shorten(value)}" for name, value in others.items())
    text = f"{_shorten(sentence, 300)}  " if sentence else ""
    time = str(event.get("time", ""))[:19]
    return f"{time:19}  {step:>9}  {event['kind']:15}  {text}{' '.join(fields)}".rstrip()


def _shorten(value: Any, limit: int = 100) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def watch(
    events: Annotated[
        Path,
        typer.Argument(metavar="EVENTS", help="The events file of a run, which may not exist yet."),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the current state and exit.")] = False,
    forever: Annotated[
        bool, typer.Option("--forever", help="Continue after the run's end, to follow restarts.")
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option("--policy", "-p", help="The run's policy file, unless it used a preset."),
    ] = None,
) -> None:
    """Follow a run in the terminal: its state, and incidents as they happen."""
    from healcore.policy import PolicyError, load
    from healcore.tools.report.runs import ReportError
    from healcore.tools.watch.follow import WatchError, follow, print_once

    printer = console(highlight=False)
    try:
        run_policy = None if policy is None else load(policy)
        path = _events_file(events)
        if once:
            status = print_once(path, run_policy, printer)
        else:
            status = follow(path, run_policy, printer, forever=forever)
    except (PolicyError, ReportError, WatchError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise typer.Exit(status)


def _events_file(events: Path) -> Path:
    """Returns a file itself, or the events file in a folder, which may not exist yet."""
    from healcore.tools.report.runs import find_events

    if events.is_dir() and not any(events.glob("*events.jsonl")):
        return events / "healcore.events.jsonl"
    return find_events(events)
