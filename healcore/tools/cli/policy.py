"""The commands `healcore policy list | show | check | diff`.

Exit status: 0 success (`diff`: no difference), 1 a policy is invalid (`diff`: the policies differ),
2 a file could not be read, a preset does not exist, or the command line is invalid. `diff` and
`show` exit with 2 for an invalid policy.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.table import Column, Table
from rich.text import Text

from healcore.tools.cli.options import SetOption
from healcore.tools.output import CANNOT_RUN, console, echo, report_errors

OK, INVALID = 0, 1

app = typer.Typer(no_args_is_help=True, help="List, show, check and compare policies.")

_Named = Annotated[str, typer.Argument(metavar="POLICY", help="A preset, a recipe or a file.")]


@app.command("list")
def list_() -> None:
    """List the policies in healcore: presets and published recipes."""
    from healcore.policy import load, preset_names, recipe_names

    printer = console()
    table = Table("preset", "mode", "clip", "what it does", box=None, pad_edge=False)
    for policy in map(load, preset_names()):
        # Text, because rich interprets brackets in a str as markup.
        table.add_row(policy.name, policy.mode, policy.clip.kind, Text(policy.description))
    printer.print(table)
    table = Table(box=None, pad_edge=False)
    table.add_column("published recipe", no_wrap=True)
    table.add_column("what it does")
    for policy in map(load, recipe_names()):
        table.add_row(policy.name, Text(policy.description))
    printer.print()
    printer.print(table)


@app.command()
@report_errors
def show(policy: _Named, set_: SetOption = None) -> None:
    """Show a policy as TOML: a preset with its comments, or every key with --set."""
    from healcore.policy import dumps, load, preset_names, preset_text, recipe_names
    from healcore.policy.loader import parse_overrides

    loaded = load(policy, **parse_overrides(set_ or (), "--set"))
    if set_ or policy not in (*preset_names(), *recipe_names()):
        echo(dumps(loaded), nl=False)
    else:
        echo(preset_text(policy), nl=False)
    engine = loaded.engine()
    tests_only_finite = engine.specialised_for(engine.init()).tests_only_finite
    in_step = "the whole policy"
    if tests_only_finite:
        in_step = "a finite test and a fixed clip"
    echo(f"\n# What stands in the optimizer's step on an accelerator: {in_step}.")


@app.command()
def check(
    policies: Annotated[
        list[str], typer.Argument(metavar="POLICY...", help="Presets, recipes or TOML files.")
    ],
) -> None:
    """Check policies, and print each problem with its correction."""
    from healcore.policy import PolicyError, fingerprint, load, to_dict

    status = OK
    for name in policies:
        try:
            policy = load(name)
        except PolicyError as error:
            echo(str(error), err=True)
            if error.unreadable:
                status = CANNOT_RUN
            else:
                status = max(status, INVALID)
        else:
            rules = f"{len(policy.respond)} rules"
            if len(policy.respond) == 1:
                rules = "1 rule"
            watched = ", ".join(to_dict(policy)["detect"]) or "nothing"
            echo(
                f"{name}: ok ({policy.mode}, clip {policy.clip.kind}, watches {watched}; "
                f"{rules}; {fingerprint(policy)})"
            )
    raise typer.Exit(status)


@app.command("diff")
@report_errors
def diff_(left: _Named, right: _Named) -> None:
    """Show the keys in which two policies differ, including defaults."""
    from healcore.policy import diff, load

    differences = diff(load(left), load(right))
    if not differences:
        echo("no difference")
        raise typer.Exit(OK)
    left_column = Column(Text(left), overflow="fold")
    right_column = Column(Text(right), overflow="fold")
    table = Table("key", left_column, right_column, box=None, pad_edge=False)
    for key, left_value, right_value in differences:
        table.add_row(key, _cell(left_value), _cell(right_value))
    console().print(table)
    raise typer.Exit(INVALID)


def _cell(value: object) -> Text:
    """Formats a value as JSON, and a key that the policy does not have as "-"."""
    if value is None:
        return Text("-")
    return Text(json.dumps(value, ensure_ascii=False))
