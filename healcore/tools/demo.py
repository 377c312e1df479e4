"""`healcore demo`: the same run with two faults, once only watched, and once healed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from healcore import adapter_registry, policy
from healcore.tools.output import echo
from healcore.tools.report import page
from healcore.tools.report.page_report import PageReport
from healcore.tools.report.run_report import read_reports

STEPS = 600
NAN_BATCH = 120
"""Index of the batch whose targets are NaN."""
HIGH_RATES = range(350, 400)
"""Steps with a learning rate 100 times too high."""
RUNS: dict[Literal["observe", "heal"], str] = {"observe": "watched", "heal": "healed"}
"""Mode of the policy -> what healcore does to a run."""


def run_demo(out: Path, frameworks: Sequence[str] = ("torch", "jax")) -> dict[str, float]:
    """Trains a network twice in each framework, prints the results, and writes one report on all.

    A policy that observes changes nothing, so the watched run ends as it does without healcore.

    Args:
        out: folder to create, for the checkpoints and events of each run, and the report.
        frameworks: "torch", "jax" or both.

    Returns:
        Name of a run -> its loss on data of no training batch.

    Raises:
        MissingExtraError: a library is not installed.
        FileExistsError: `out` exists.
    """
    adapter_registry.require("report", "matplotlib", "jinja2")
    trainings = {name: adapter_registry.find(name, "demo_training") for name in frameworks}
    out.mkdir(parents=True)
    echo(
        f"A small network trains for {STEPS} steps with two faults: the targets of batch "
        f"{NAN_BATCH} are NaN, and the learning rate is 100 times too high from step "
        f"{HIGH_RATES[0]} to {HIGH_RATES[-1]}."
    )
    batches = [_batch(index) for index in range(STEPS)]
    batches[NAN_BATCH][1].fill(np.nan)
    rates = np.full(STEPS, 3e-3)
    rates[HIGH_RATES] *= 100
    losses: dict[str, float] = {}
    reports: list[PageReport] = []
    for name, train in trainings.items():
        for mode, made in RUNS.items():
            run = f"{name}-{made}"
            echo(f"\n{name}, {made} by healcore:")
            losses[run] = train(
                policy.load("default", mode=mode), out / run, batches, rates, _batch(STEPS)
            )
            echo(f"loss at the end, on unseen data: {losses[run]:.4g}")
            reports += read_reports(out / run)
    report = out.absolute() / "report.html"
    report.write_text(page.render(reports), encoding="utf-8")
    echo(f"\nopen in a browser: {report}\nevents and checkpoints: {out}")
    return losses


def _batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    inputs = random.standard_normal((64, 8), np.float32)
    targets = np.sin(inputs.sum(axis=1, keepdims=True))
    return inputs, targets + 0.1 * random.standard_normal((64, 1), np.float32)
