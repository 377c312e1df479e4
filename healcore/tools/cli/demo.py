"""The command `healcore demo`.

Exit status: 0 all claims hold, 1 a claim does not hold, 2 the demo could not run.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from healcore.tools.cli.options import fail

STEPS, QUICK_STEPS = 300, 240


class _Framework(enum.StrEnum):
    TORCH = "torch"
    JAX = "jax"
    BOTH = "both"


def demo(
    framework: Annotated[_Framework, typer.Option(help="Framework of the runs.")] = _Framework.BOTH,
    policy: Annotated[
        str, typer.Option("--policy", "-p", help="A preset or a TOML file.")
    ] = "default",
    steps: Annotated[
        int | None,
        typer.Option(
            show_default=f"{STEPS}",
            help=f"Steps of each run. The detectors need at least {QUICK_STEPS} to work well.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{QUICK_STEPS} steps, and no run with a fixed clip.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, show_default="0", help="Seed of weights and data.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Train with the seeds 0 to N - 1."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="healcore-demo",
            help="Folder for the picture and the healed runs.",
        ),
    ] = None,
) -> None:
    """Train a failing run unprotected and healed, in torch and in JAX, and compare."""
    if seed is not None and seeds is not None:
        raise typer.BadParameter("--seed is a seed, --seeds a number of seeds: write only one")
    from healcore.demo.scenario import DemoError
    from healcore.extras import MissingExtraError
    from healcore.policy import PolicyError
    from healcore.tools.demo import run_demo
    from healcore.tools.output_files import OutputError

    arms = ("unprotected", "healed") if quick else ("unprotected", "fixed clip", "healed")
    try:
        result = run_demo(
            frameworks=("torch", "jax") if framework is _Framework.BOTH else (framework.value,),
            seeds=(seed or 0,) if seeds is None else range(seeds),
            arms=arms,
            steps=(QUICK_STEPS if quick else STEPS) if steps is None else steps,
            policy=policy,
            out=out,
        )
    except (MissingExtraError, PolicyError, OutputError, DemoError, OSError) as error:
        fail(f"healcore demo: {error}")
    raise typer.Exit(0 if all(claim.holds for claim in result.claims) else 1)
