"""The comparison: the same runs in both frameworks, in turn, step by step."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Generator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from healcore import policy as policies
from healcore.demo import corpus as corpora
from healcore.demo import output
from healcore.demo.claims import Claim, claims
from healcore.demo.runs import ARMS, DemoRun, Step, number, shortened
from healcore.demo.scenario import Scenario
from healcore.extras import require
from healcore.plugins import registry
from healcore.runtime import events

FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "optax", "flax", "chex")}
"""Their modules."""


class Result(NamedTuple):
    """What the demo found."""

    runs: list[DemoRun]
    claims: list[Claim]


def run_demo(
    *,
    frameworks: Sequence[str] = tuple(FRAMEWORKS),
    arms: Sequence[str] = ARMS,
    seeds: Sequence[int] = (0,),
    steps: int = 300,
    policy: Any = "default",
    out: Path = Path("healcore-demo"),
    console: Console | None = None,
    **sizes: int,
) -> Result:
    """Trains each model unprotected, with a fixed clip, and healed; prints what became of them.

    Writes `curves.png` into `out`, and a folder for each healed run with its checkpoints, events,
    metrics, postmortem and report; those of an earlier demo are deleted.

    Args:
        frameworks: "torch", "jax" or both.
        arms: how the runs are protected, of `ARMS`; "healed" is one of them.
        seeds: of weights and data; each makes one run per framework and arm.
        steps: per run.
        policy: anything `healcore.policy.load` takes; the same object heals in both frameworks.
            Its probation is shortened to fit (`shortened`).
        out: folder for the files; made if it is not there.
        console: where to print.
        **sizes: of the model and the batch, see `Scenario`.

    Returns:
        The runs, and what is claimed of them.

    Raises:
        MissingExtraError: a framework, matplotlib or plotly is not installed.
        healcore.policy.PolicyError: there is no such policy, or it is not valid.
        CorpusError: the standard library's sources are not there.
        ScenarioError: too few steps, or sizes that do not fit.
    """
    require("report", "matplotlib", "plotly")
    for framework in frameworks:
        require(framework, *FRAMEWORKS[framework])
    policy, text = shortened(policies.load(policy)), corpora.load()
    scenarios = [Scenario(text, seed=seed, steps=steps, **sizes) for seed in seeds]
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    console = console or Console()
    output.introduce(console, scenarios[0], policy)
    runs: list[DemoRun] = []
    for scenario in scenarios:
        training = []
        for framework, arm in product(frameworks, arms):
            run = DemoRun(framework, arm, scenario.seed)
            if arm == "healed":
                run.folder = out / f"{framework}-healed-seed{scenario.seed}"
                shutil.rmtree(run.folder, ignore_errors=True)  # of an earlier demo
                run.folder.mkdir()
            train = registry.find(framework, "demo_training")
            training.append((run, train(scenario, arm, policy, run.folder)))
            runs.append(run)
        _train(console, scenario, training)
    for run in runs:
        if run.arm == "healed":
            run.events = events.read(run.folder / "events.jsonl").events
    found = claims(runs, scenarios[0])
    output.show(console, runs, found, scenarios[0], out)
    console.print(f"{time.monotonic() - started:.0f} s", highlight=False)
    return Result(runs, found)


def _train(
    console: Console,
    scenario: Scenario,
    runs: Sequence[tuple[DemoRun, Generator[Step, None, Any]]],
) -> None:
    """Takes a step of each run, then the next of each, until all are done."""
    columns = TextColumn("{task.description:17}"), BarColumn(bar_width=30), MofNCompleteColumn()
    loss = TextColumn("loss {task.fields[loss]:>6}")
    with Progress(*columns, loss, console=console) as bars, _Warnings(console) as warnings:
        left = [
            (*each, bars.add_task(str(each[0]), total=scenario.steps, loss="")) for each in runs
        ]
        while left:
            for each in tuple(left):
                run, loop, bar = each
                warnings.turn = run.framework
                try:
                    run.steps.append(next(loop))
                except StopIteration as end:
                    run.finish(end.value)
                    left.remove(each)
                else:
                    # The loss of the step before has arrived by now: nothing waits for it.
                    before = float(run.steps[-2:][0].loss)
                    bars.update(bar, completed=run.steps[-1].batch + 1, loss=number(before))


class _Warnings(logging.Handler):
    """Prints warnings of the Healers above the bars, while it is entered; they go nowhere else."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.WARNING)
        self.turn = ""
        """Framework of the run that is taking its step."""
        self._console = console
        self._log = logging.getLogger("healcore")
        self._before = self._log.level, self._log.propagate

    def emit(self, record: logging.LogRecord) -> None:
        """Prints one line."""
        line = f"{self.turn}: {record.getMessage()}"
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def __enter__(self) -> _Warnings:
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)  # at a higher level Healers would print for themselves
        self._log.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.level, self._log.propagate = self._before
