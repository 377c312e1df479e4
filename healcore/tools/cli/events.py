"""The commands `healcore events schema | show`.

Exit status: 0 success, 1 `show` found damaged lines, 2 the file could not be read. Of
`show --follow`: 0 the run completed, 1 it ended in another way, 130 after Ctrl-C.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from healcore.tools.cli.options import fail
from healcore.tools.terminal import echo, echo_json

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
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Wait for new events until the run ends."),
    ] = False,
) -> None:
    """Print a line per event: time, step, kind. Lists damaged lines on standard error."""
    from healcore.events import read

    if follow:
        path = Path(file)
        _follow(path / "healcore.events.jsonl" if path.is_dir() else path, kind)
    try:
        history = read(file)
    except (OSError, ValueError) as error:  # ValueError: the path has a NUL character
        fail(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}")
    run = None
    for event in history.events:
        run = _print(event, run, kind)
    for problem in history.problems:
        echo(f"line {problem.line}: {problem.problem}", err=True)
    raise typer.Exit(DAMAGED if history.problems else OK)


def _print(event: dict[str, Any], run: str | None, kinds: list[str] | None) -> str | None:
    """Prints an event of these kinds, after the id of a run that is not `run`. Returns the id."""
    if kinds and event["kind"] not in kinds:
        return run
    if event["run"] != run:
        echo(f"run {event['run']}")
    echo(_line(event))
    return event["run"]


def _follow(path: Path, kinds: list[str] | None) -> NoReturn:
    """Prints events as they are written, to the end of the run."""
    from healcore.events import log
    from healcore.history import Run
    from healcore.history.process import RunState
    from healcore.history.run import is_continuation
    from healcore.tools.follow import batches_of_lines

    run, shown, gone = Run(), None, False
    if not path.exists():
        echo(f"{path} does not exist yet: waiting for the run to start (Ctrl-C ends)", err=True)
    try:
        for lines in batches_of_lines(path):
            for line in filter(bytes.strip, lines):
                event = log.parse(line)
                if isinstance(event, str):
                    echo(f"a damaged line: {event}", err=True)
                    continue
                if not event.get("rank"):
                    new = event["kind"] == "start" and not is_continuation([event])
                    run = Run() if new else run
                    run.add(event)
                shown = _print(event, shown, kinds)
            if run.end is not None:
                raise typer.Exit(OK if run.state is RunState.COMPLETED else DAMAGED)
            if gone and not lines:
                echo("the process was killed: it wrote no event of its end", err=True)
                raise typer.Exit(DAMAGED)
            gone = run.state is RunState.GONE  # it may have written its end before it ended
    except OSError as error:
        fail(f"{path} cannot be read: {error.strerror or error}")
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    raise AssertionError("the lines of a file have no end")


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
