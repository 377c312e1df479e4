"""The demo itself: the same runs in both frameworks, in turn, step by step."""

from __future__ import annotations

import importlib
import itertools
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from healcore import policy as policies
from healcore.demo import acts as story
from healcore.demo import corpus as corpora
from healcore.demo import picture
from healcore.demo.history import ARMS, History
from healcore.demo.outcome import broken_claims
from healcore.demo.progress import Bars, Speaker
from healcore.demo.rollbacks import told
from healcore.demo.scenario import Scenario
from healcore.demo.table import legend, table
from healcore.demo.terms import SAVE_EVERY, shortened
from healcore.extras import require
from healcore.policy import Policy

FRAMEWORKS = ("torch", "jax")


class Result(NamedTuple):
    """What the demo found."""

    histories: list[History]
    broken: list[str]
    """A sentence for each thing that is not as the demo claims."""


def run_demo(
    *,
    frameworks: Sequence[str] = FRAMEWORKS,
    arms: Sequence[str] = ARMS,
    seeds: Sequence[int] = (0,),
    steps: int = 300,
    policy: Any = "default",
    out: Path = Path("healcore-demo"),
    console: Console | None = None,
    **sizes: int,
) -> Result:
    """Trains each model unprotected, with a fixed clip, and healed; says what became of them.

    Writes `curves.png` into `out`, and a folder for each healed run with its checkpoints, its
    events file and its postmortem; those of an earlier demo are deleted.

    Args:
        frameworks: "torch", "jax" or both.
        arms: how the runs are protected, of `ARMS`.
        seeds: of weights and data; each makes one run per framework and arm.
        steps: per run.
        policy: anything `healcore.policy.load` takes; the same object heals in both frameworks.
            Its probation is shortened to fit (`terms.shortened`).
        out: folder for the files; made if it is not there.
        console: where to print.
        **sizes: of the model and the batch, see `Scenario`.

    Returns:
        What became of the runs, and what of that is not as the demo claims.

    Raises:
        MissingExtraError: a framework or matplotlib is not installed.
        healcore.policy.PolicyError: there is no such policy, or it is not valid.
        CorpusError: the standard library's sources are not there.
        ScenarioError: too few steps, or sizes that do not fit.
        ValueError: there is no such framework.
    """
    require("report", "matplotlib")
    loops = {name: _loop(name) for name in frameworks}
    policy = shortened(policies.load(policy))
    text = corpora.load()
    scenarios = [Scenario(text, seed=seed, steps=steps, **sizes) for seed in seeds]
    out.mkdir(parents=True, exist_ok=True)
    console = console or Console()
    _headline(console, scenarios[0], policy)

    started = time.monotonic()
    histories: list[History] = []
    for scenario in scenarios:
        histories += _compared(console, scenario, loops, arms, policy, out)
    console.print(table(histories, scenarios[0]))
    console.print(legend(scenarios[0]) + "\n", style="dim", highlight=False)
    story.tell(console, histories, scenarios[0])
    picture.draw(histories, scenarios[0], out / "curves.png")
    console.print(
        f"{time.monotonic() - started:.0f} s. Curves: {out / 'curves.png'}. Checkpoints, events "
        f"and postmortem of each healed run: {out}/*-healed-*",
        soft_wrap=True,
        highlight=False,
    )
    broken = broken_claims(histories, scenarios[0])
    for sentence in broken:
        console.print(f"[red]Not as claimed:[/] {sentence}.", soft_wrap=True)
    return Result(histories, broken)


def _loop(framework: str) -> Any:
    """The training loop of a framework; nothing of it is imported before it is asked for."""
    extras = {"torch": ("torch", "torch"), "jax": ("jax", "jax", "optax", "flax", "chex")}
    if framework not in extras:
        raise ValueError(f"framework must be one of {FRAMEWORKS}, got {framework!r}")
    require(*extras[framework])
    return importlib.import_module(f"healcore.{framework}.demo.training")


def _compared(
    console: Console,
    scenario: Scenario,
    loops: Mapping[str, Any],
    arms: Sequence[str],
    policy: Any,
    out: Path,
) -> list[History]:
    """Trains all runs of one seed."""
    bars, speaker = Bars(console, scenario.corpus.byte_frequency_loss), Speaker(console)
    folders = {name: out / f"{name}-healed-seed{scenario.seed}" for name in loops}
    runs: list[tuple[History, Iterator[int]]] = []
    for (framework, loop), arm in itertools.product(loops.items(), arms):
        history = History(framework, arm, scenario.seed, bars.step)
        bars.add(history, scenario.steps)
        runs.append((history, loop.train(scenario, history, policy, folders[framework])))
    for folder in folders.values():
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier demo
        folder.mkdir()
    with bars.progress, speaker.listening():
        _in_turn(runs, speaker)
    histories = [history for history, _ in runs]
    for history in histories:
        if history.arm == "healed":
            history.rollbacks, history.ending = told(folders[history.framework] / "events.jsonl")
    return histories


def _in_turn(runs: Sequence[tuple[History, Iterator[int]]], speaker: Speaker) -> None:
    """Takes a step of each run, then the next of each, until all are done."""
    left = list(runs)
    while left:
        for each in tuple(left):
            speaker.turn = each[0].framework
            if next(each[1], None) is None:
                left.remove(each)


def _headline(console: Console, scenario: Scenario, policy: Policy) -> None:
    wrong, bad = scenario.mistaken, sorted(scenario.corrupted)
    console.print(
        f"[bold]A byte-level transformer[/] ({scenario.layers} layers, width {scenario.width}) on "
        f"the {scenario.corpus.files} modules of the standard library, {scenario.steps} steps. "
        f"Random bytes instead of text in batches {', '.join(map(str, bad))}; a learning rate "
        f"{scenario.mistake:g} times too high in steps {wrong.start} to {wrong.stop - 1}; a batch "
        f"whose loss is 0/0, number {scenario.empty}. Policy: [cyan]{policy.name}[/], with a "
        f"checkpoint every {SAVE_EVERY} steps that is known-good after "
        f"{policy.rollback.probation} healthy ones, because the run is so short.\n"
    )
