"""`healcore demo`: the whole of it lives in `healcore.demo`."""

from __future__ import annotations

import importlib

import typer


def add_to(app: typer.Typer) -> None:
    """Adds the command to the app."""
    app.command(
        "demo",
        add_help_option=False,  # --help goes to the demo too
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        help="A run that fails, unprotected and healed, in torch and in JAX, side by side.",
    )(_demo)


def _demo(context: typer.Context) -> None:
    main = importlib.import_module("healcore.demo.main")
    raise typer.Exit(main.main(context.args))
