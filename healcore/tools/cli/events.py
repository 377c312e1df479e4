"""`healcore events schema | show`.

Exit status: 0 all is well, 1 `show` found damaged lines in the file, 2 it could not be read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from healcore.runtime.events import read
from healcore.tools.terminal import say, say_json

OK, DAMAGED, UNUSABLE = 0, 1, 2

_HEAD = frozenset({"schema", "seq", "run", "time", "mono", "kind", "step"})

app = typer.Typer(no_args_is_help=True, help="Look at the events of a run.")


@app.command("schema")
def schema_(
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Of a metrics file instead of an events file.")
    ] = False,
) -> None:
    """The JSON Schema of one line of an events file."""
    from healcore.runtime.events import schema  # builds the models, which `show` does without

    found = schema.metrics_schema() if metrics else schema.json_schema()
    say_json(json.dumps(found, indent=2))


@app.command()
def show(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The events file of a run.")],
    kind: Annotated[
        list[str] | None, typer.Option("--kind", help="Only events of this kind; may be repeated.")
    ] = None,
) -> None:
    """One line per event: when, at which step, what. Damaged lines go to standard error."""
    try:
        history = read(file)
    except OSError as error:
        say(f"{file} cannot be read: {error.strerror or error}", err=True)
        raise typer.Exit(UNUSABLE) from error
    run = None
    for event in history.events:
        if kind and event["kind"] not in kind:
            continue
        if event["run"] != run:
            run = event["run"]
            say(f"run {run}")
        say(_line(event))
    for problem in history.problems:
        say(f"line {problem.line}: {problem.problem}", err=True)
    raise typer.Exit(DAMAGED if history.problems else OK)


def _line(event: dict[str, Any]) -> str:
    step = "-" if event.get("step") is None else event["step"]
    told = (f"{name}={_short(value)}" for name, value in event.items() if name not in _HEAD)
    when = str(event.get("time", ""))[:19]
    return f"{when:19}  {step:>9}  {event['kind']:15}  {' '.join(told)}".rstrip()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:97]}..."
