"""The demo itself: the same runs in both frameworks, in turn, step by step."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from healcore import policy as policies
from healcore.core.verdict import Action
from healcore.demo import corpus as corpora
from healcore.demo import picture
from healcore.demo.events import Events
from healcore.demo.history import ARMS, History
from healcore.demo.outcome import broken_claims, outcome
from healcore.demo.progress import Bars
from healcore.demo.scenario import Scenario
from healcore.demo.table import legend, table
from healcore.extras import require

FRAMEWORKS = ("torch", "jax")


class Result(NamedTuple):
    """What the demo found."""

    histories: list[History]
    broken: list[str]
    """A sentence for each healed run that did not train and each unprotected one that did."""


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

    Writes `curves.png` and `events.jsonl` into `out`.

    Args:
        frameworks: "torch", "jax" or both.
        arms: how the runs are protected, of `ARMS`.
        seeds: of weights and data; each makes one run per framework and arm.
        steps: per run.
        policy: anything `healcore.policy.load` takes; the same object heals in both frameworks.
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
    policy = policies.load(policy)
    text = corpora.load()
    scenarios = [Scenario(text, seed=seed, steps=steps, **sizes) for seed in seeds]
    out.mkdir(parents=True, exist_ok=True)
    console = console or Console()
    _headline(console, scenarios[0], policy)

    started = time.monotonic()
    histories: list[History] = []
    with closing(Events(out / "events.jsonl")) as events:
        events.write(
            "start",
            policy=policy.name,
            policy_fingerprint=policies.fingerprint(policy),
            frameworks=list(frameworks),
            seeds=list(seeds),
            steps=steps,
            text=text.digest,
            corrupted=sorted(scenarios[0].corrupted),
            mistaken=[scenarios[0].mistaken.start, scenarios[0].mistaken.stop],
            empty=scenarios[0].empty_step,
        )
        for scenario in scenarios:
            bars = Bars(console, text.byte_frequency_loss)
            runs = []
            for framework, arm in itertools.product(frameworks, arms):
                history = History(
                    framework, arm, scenario.seed, _both(bars, events), events.rollback
                )
                bars.add(history, steps)
                histories.append(history)
                runs.append(loops[framework].train(scenario, history, policy))
            with bars.progress:
                _in_turn(runs)
        for history in histories:
            events.write(
                "result",
                framework=history.framework,
                run=history.arm,
                seed=history.seed,
                held_out_loss=history.held_out_loss,
                spikes=history.spikes,
                skips=history.skips,
                clips=history.clips,
                lr_cuts=history.count(Action.CUT_LR),
                rollbacks=len(history.rollbacks),
                verdict=outcome(history, text).value,
            )
    console.print(table(histories, scenarios[0]))
    console.print(legend(scenarios[0]), style="dim", highlight=False)
    picture.draw(histories, scenarios[0], out / "curves.png")
    console.print(
        f"{time.monotonic() - started:.0f} s. Curves: {out / 'curves.png'}  "
        f"events: {out / 'events.jsonl'}",
        soft_wrap=True,
    )
    broken = broken_claims(histories, text)
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


def _in_turn(runs: list[Iterator[int]]) -> None:
    """Takes a step of each run, then the next of each, until all are done."""
    while runs:
        runs = [run for run in runs if next(run, None) is not None]


def _both(bars: Bars, events: Events) -> Any:
    def on_step(history: History, step: Any) -> None:
        bars.step(history, step)
        events.step(history, step)

    return on_step


def _headline(console: Console, scenario: Scenario, policy: Any) -> None:
    wrong, bad = scenario.mistaken, sorted(scenario.corrupted)
    console.print(
        f"[bold]A byte-level transformer[/] ({scenario.layers} layers, width {scenario.width}) on "
        f"the {scenario.corpus.files} modules of the standard library, {scenario.steps} steps. "
        f"Random bytes instead of text at steps {', '.join(map(str, bad))}; a learning rate "
        f"{scenario.mistake:g} times too high in steps {wrong.start} to {wrong.stop - 1}; a batch "
        f"whose loss is 0/0 at step {scenario.empty_step}. Policy: [cyan]{policy.name}[/].\n"
    )
