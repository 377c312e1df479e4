"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A value to replace in the policy, for example clip.max_norm=1.0. Repeatable.",
    ),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(metavar="SIGNAL=NAME", help="Column of a signal: loss=train/ce. Repeatable."),
]
JsonlOption = Annotated[
    str | None,
    typer.Option(metavar="OUT", help="Write a JSON object per decision; - is standard output."),
]
JoinOption = Annotated[
    bool, typer.Option("--join", help="All traces are attempts of one run, in this order.")
]
