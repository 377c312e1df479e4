"""Runs the demo, and keeps its table, its claims and its picture for the documentation.

python -m benchmarks.demo [--quick] [--json FILE] [--figure FILE.png]
"""

from __future__ import annotations

import math
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import arguments, write_json
from healcore.demo.runs import FIXED_CLIP, DemoRun
from healcore.demo.scenario import Scenario, load_corpus
from healcore.tools.demo import run_demo
from healcore.tools.report.runs import read_reports

COLORS = {"unprotected": "#3b3b3b", "fixed clip": "#e69f00", "healed": "#0072b2"}
TITLES = {"fixed clip": "clipped to 1.0", "healed": "healcore"}


def main() -> None:
    """Runs the command."""
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw docs/demo.png")
    options = parser.parse_args()
    steps = 240 if options.quick else 300
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="healcore-demo-") as folder:
        result = run_demo(steps=steps, out=Path(folder) / "demo")
        seconds = round(time.monotonic() - began)
        scenario = Scenario(load_corpus(), seed=0, steps=steps)
        runs = [_as_data(run, scenario) for run in result.runs]
    if options.figure:
        draw(result.runs, scenario, options.figure)
        print(f"written to {options.figure}")
    claims = [claim._asdict() for claim in result.claims]
    data = {"seconds": seconds, "steps": steps, "runs": runs, "claims": claims}
    write_json(options.json, data)


def _as_data(run: DemoRun, scenario: Scenario) -> dict[str, Any]:
    counts = read_reports(run.folder / "events.jsonl")[0].counts if run.events else None
    clips = counts.clips if counts else 0
    if run.arm == "fixed clip":
        clips = int((run.column("grad_norm") > FIXED_CLIP).sum())
    return {
        "framework": run.framework,
        "arm": run.arm,
        "loss_before": _strict(run.mean_loss(scenario.empty_batch)),
        "held_out_loss": _strict(run.held_out_loss),
        "skips": counts.skips if counts else 0,
        "clips": clips,
        "rollbacks": [
            {key: event[key] for key in ("step", "onset", "checkpoint")} for event in run.rollbacks
        ],
        "ending": run.ending,
    }


def _strict(value: float) -> float | str:
    """A number, or its name where strict JSON has no number."""
    return value if math.isfinite(value) else str(value)


def draw(runs: list[DemoRun], scenario: Scenario, path: Path) -> None:
    """Draws the loss of the three runs of each framework."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    frameworks = list(dict.fromkeys(run.framework for run in runs))
    figure, axes = pyplot.subplots(1, len(frameworks), figsize=(10, 3), sharey=True, squeeze=False)
    raised = scenario.wrong_lr_steps
    for axis, framework in zip(axes[0], frameworks, strict=True):
        axis.axvspan(raised.start, raised.stop, color="#d9d9d9", lw=0)
        axis.text(raised.stop + 3, 30, "learning\nrate × 16", fontsize=8, color="#444444")
        axis.axvline(scenario.empty_batch, color="#999999", lw=0.8, ls=":")
        axis.text(scenario.empty_batch + 3, 30, "empty\nbatch", fontsize=8, color="#444444")
        for run in (each for each in runs if each.framework == framework):
            kept = {
                step.step: step.loss for step in run.steps
            }  # a repeated step replaces its undone form
            label, width = TITLES.get(run.arm, run.arm), 2.0 if run.arm == "healed" else 1.2
            axis.plot(list(kept), list(kept.values()), color=COLORS[run.arm], lw=width, label=label)
            if run.arm != "healed":
                last = max(step for step, loss in kept.items() if math.isfinite(loss))
                axis.plot(last, kept[last], "x", color=COLORS[run.arm], ms=7, mew=2)
        axis.set(title={"jax": "JAX"}.get(framework, framework), xlabel="step", yscale="log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("training loss")
    axes[0][-1].legend(frameon=False, fontsize=8, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    main()
