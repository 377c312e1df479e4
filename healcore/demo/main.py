"""`healcore demo`: the options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from healcore.demo.corpus import CorpusError
from healcore.demo.scenario import ScenarioError
from healcore.extras import MissingExtraError
from healcore.policy import PolicyError

STEPS, QUICK_STEPS = 300, 240


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = argparse.ArgumentParser(
        prog="healcore demo",
        description="Trains a small transformer with real faults in torch and in JAX: unprotected, "
        "with a fixed clip, and healed. Exit status 1 if a healed run did not train, an "
        "unprotected one did not fail, or no run was saved by going back.",
    )
    found.add_argument("--framework", choices=("torch", "jax", "both"), default="both")
    found.add_argument("--policy", default="default", help="name of a preset or a TOML file")
    found.add_argument(
        "--steps",
        type=int,
        help=f"of each run ({STEPS}); below {QUICK_STEPS} detectors have little to learn from",
    )
    found.add_argument(
        "--quick", action="store_true", help=f"{QUICK_STEPS} steps, and no run with a fixed clip"
    )
    which = found.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, default=0, help="of weights and data (0)")
    which.add_argument("--seeds", type=int, metavar="N", help="the seeds 0 to N - 1, one by one")
    found.add_argument(
        "--out",
        type=Path,
        default=Path("healcore-demo"),
        metavar="DIR",
        help="folder for curves.png, checkpoints, events and postmortems (healcore-demo)",
    )
    return found


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        args: command line without the program's name; sys.argv's if None.

    Returns:
        The exit status: 0 as claimed, 1 not as claimed, 2 could not run.
    """
    options = parser().parse_args(args)
    if options.seed < 0 or (options.seeds is not None and options.seeds < 1):
        parser().error("--seed takes a number from 0 up, --seeds how many, from 1 up")
    # After the options, so that --help is there at once.
    from healcore.demo.history import ARMS
    from healcore.demo.run import FRAMEWORKS, run_demo

    try:
        result = run_demo(
            frameworks=FRAMEWORKS if options.framework == "both" else (options.framework,),
            seeds=range(options.seeds) if options.seeds is not None else (options.seed,),
            arms=("unprotected", "healed") if options.quick else ARMS,
            steps=options.steps or (QUICK_STEPS if options.quick else STEPS),
            policy=options.policy,
            out=options.out,
        )
    except (MissingExtraError, PolicyError, CorpusError, ScenarioError, OSError) as error:
        print(f"healcore demo: {error}", file=sys.stderr)
        return 2
    return 1 if result.broken else 0
