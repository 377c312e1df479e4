"""The command `healcore demo`.

Exit status: 0 the runs ended, 2 the demo could not run.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class _Framework(enum.StrEnum):
    TORCH = "torch"
    JAX = "jax"
    BOTH = "both"


def demo(
    framework: Annotated[_Framework, typer.Option(help="Framework of the runs.")] = _Framework.BOTH,
    steps: Annotated[
        int, typer.Option(help="Steps of each run. The detectors need at least 240 to work well.")
    ] = 300,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="New folder for the picture and the healed runs.")
    ] = Path("healcore-demo"),
) -> None:
    """Train a failing run unprotected, clipped and healed, in torch and in JAX, and compare."""
    from healcore.tools.demo import run_demo

    frameworks = ("torch", "jax") if framework is _Framework.BOTH else (framework.value,)
    run_demo(out, frameworks=frameworks, steps=steps)
