"""The commands `healcore policy list | show | check | diff`.

Exit status: 0 success (`diff`: no difference), 1 a policy is wrong (`diff`: they differ), 2 a file
could not be read, there is no such preset, or the command line is wrong. `diff` and `show` exit
with 2 for a wrong policy.
"""

from __future__ import annotations

import json
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from healcore.tools.cli.options import UNUSABLE, Set, fail, overrides_of
from healcore.tools.terminal import console, echo, echo_json

if TYPE_CHECKING:  # imported where it is used, so that the other commands start fast
    from healcore.policy import Policy

OK, WRONG = 0, 1

app = typer.Typer(no_args_is_help=True, help="Look at policies, check them, compare them.")

_Named = Annotated[str, typer.Argument(metavar="POLICY", help="A preset, a recipe or a file.")]
_Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


@app.command("list")
def list_(as_json: _Json = False) -> None:
    """The policies that come with healcore: its presets, and published recipes."""
    from healcore.policy import fingerprint, load, preset_names, recipe_names

    presets = [load(name) for name in preset_names()]
    recipes = [load(name) for name in recipe_names()]
    if as_json:
        kinds = [*zip(presets, repeat("preset")), *zip(recipes, repeat("recipe"))]
        rows = [
            {
                "name": policy.name,
                "kind": kind,
                "mode": policy.mode,
                "clip": _clipping(policy),
                "fingerprint": fingerprint(policy),
                "description": policy.description,
            }
            for policy, kind in kinds
        ]
        echo_json(json.dumps(rows, indent=2))
        return
    printer = console()
    table = Table("preset", "mode", "clip", "what it does", box=None, pad_edge=False)
    for policy in presets:
        # Text, not str: brackets in a description are not rich markup.
        table.add_row(policy.name, policy.mode, _clipping(policy), Text(policy.description))
    printer.print(table)
    table = Table(box=None, pad_edge=False)
    table.add_column("published recipe", no_wrap=True)
    table.add_column("what it does")
    for policy in recipes:
        table.add_row(policy.name, Text(policy.description))
    printer.print()
    printer.print(table)


@app.command()
def show(
    policy: _Named,
    full: Annotated[
        bool, typer.Option("--full", help="Every key with its value, defaults included.")
    ] = False,
    as_json: _Json = False,
    set_: Set = None,
) -> None:
    """A policy as TOML: a preset or recipe with its comments, or with --full or --set every key."""
    from healcore.policy import dumps, preset_names, preset_text, recipe_names, to_dict

    loaded = _load(policy, set_)
    if as_json:
        echo_json(json.dumps(to_dict(loaded), indent=2))
    elif full or set_ or policy not in (*preset_names(), *recipe_names()):
        echo(dumps(loaded), nl=False)
    else:
        echo(preset_text(policy), nl=False)


@app.command()
def check(
    policies: Annotated[
        list[str], typer.Argument(metavar="POLICY...", help="Presets, recipes or TOML files.")
    ],
) -> None:
    """Prints what is wrong with a policy, and what to write instead."""
    from healcore.policy import PolicyError, fingerprint, load, to_dict

    status = OK
    for name in policies:
        try:
            policy = load(name)
        except PolicyError as error:
            echo(str(error), err=True)
            status = max(status, UNUSABLE if error.unreadable else WRONG)
        else:
            rules = len(policy.respond)
            watched = ", ".join(to_dict(policy)["detect"]) or "nothing"
            echo(
                f"{name}: ok ({policy.mode}, clip {_clipping(policy)}, watches {watched}; "
                f"{rules} rule{'s' if rules != 1 else ''}; {fingerprint(policy)})"
            )
    raise typer.Exit(status)


@app.command("diff")
def diff_(left: _Named, right: _Named, as_json: _Json = False) -> None:
    """The keys in which two policies differ, defaults included."""
    from healcore.policy import diff

    found = diff(_load(left), _load(right))
    if as_json:
        echo_json(json.dumps([difference._asdict() for difference in found], indent=2))
    elif found:
        table = Table("key", left, right, box=None, pad_edge=False)
        for key, a, b in found:
            table.add_row(key, _cell(a), _cell(b))
        console().print(table)
    else:
        echo("no difference")
    raise typer.Exit(WRONG if found else OK)


def _load(name: str, pairs: list[str] | None = None) -> Policy:
    from healcore.policy import PolicyError, load

    try:
        return load(name, **overrides_of(pairs))
    except PolicyError as error:
        fail(str(error))


def _cell(value: Any) -> Text:
    return Text("-" if value is None else json.dumps(value, ensure_ascii=False))


def _clipping(policy: Policy) -> str:
    """What is clipped: the kind of `clip`, and the update where `[update_clip]` is there."""
    rule = policy.clip.rule()
    kind = rule[0] if rule else policy.clip.kind
    return kind if policy.update_clip is None else f"{kind} + update"
