"""Healed runs that kill themselves: `python -m tests.healer.killed_runs SCENARIO ARGUMENTS...`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from healcore import policy as policies
from tests import forked_programs
from tests.healer.training_loops import RULES, Faults, loop_of, rules, train


def killed(scenario: Callable[..., None], *arguments: object) -> None:
    """Runs a function of this file in a process of its own, until it kills itself."""
    done = forked_programs.run("-m", "tests.healer.killed_runs", scenario.__name__, *arguments)
    assert done.returncode == -9, done.stderr


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(folder: str, step: str) -> None:
    """Killed at a step, with every checkpoint on disk."""

    def before(healer: Any, number: int) -> None:
        if healer.step == int(step):
            healer._loop.saver.store.wait()
            die()

    train(loop_of("torch"), rules(), range(40), store=Path(folder), before=before)


def stopped() -> None:
    """Stopped by the policy: nothing catches it."""
    try:
        train(loop_of("torch", Faults(always=range(8, 40))), rules(recoveries=1), range(40))
    except Exception:
        print("swallowed")
    print("went on")


# -- a poisoned model -----------------------------------------------------------------------------


def poisoned(framework: str, folder: str) -> None:
    """Poisoned at step 8, saved at step 10, killed at step 11."""
    policy = never_known_good()
    loop = loop_of(framework, policy=policy)

    def before(healer: Any, number: int) -> None:
        if number == 8:
            loop.state = healer.state
            poison(loop)
            healer.update(loop.state) if framework == "jax" else None
        if number == 11:
            healer._loop.saver.store.wait()
            die()

    train(loop, policy, range(30), store=Path(folder), before=before)


def never_known_good() -> Any:
    """A policy under which no checkpoint of a short run becomes known-good."""
    text = RULES.format(cut="", skip_batches=0, recoveries=3)
    return policies.loads(text.replace("probation = 4", "probation = 1000"))


def poison(loop: Any) -> None:
    """Makes the weights large but finite: no loss shows it yet."""
    if loop.framework == "torch":
        loop.model[0].bias.data += 1e8
    else:
        params = loop.state["params"]
        loop.state = {**loop.state, "params": {**params, "b1": params["b1"] + 1e8}}


def is_poisoned(loop: Any) -> bool:
    if loop.framework == "torch":
        return float(loop.model[0].bias.detach().max()) > 1e6
    return float(loop.state["params"]["b1"].max()) > 1e6


def show_poison(loop: Any, number: int) -> None:
    """From batch 12 on the loss of a poisoned model is NaN."""
    loop.faults.always = frozenset([number] if number >= 12 and is_poisoned(loop) else [])


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
