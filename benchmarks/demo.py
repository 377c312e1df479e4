"""Runs the demo, and keeps its table and its picture for the documentation.

python -m benchmarks.demo [--quick] [--json FILE] [--figure FILE.png]
"""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.side_by_side import arguments, write_json
from healcore.demo.scenario import Scenario, load_corpus
from healcore.tools.demo import DemoRun, run_demo


def main() -> None:
    """Runs the command."""
    parser = arguments((__doc__ or "").partition("\n")[0])
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw docs/demo.png")
    options = parser.parse_args()
    steps = 240 if options.quick else 300
    with tempfile.TemporaryDirectory(prefix="healcore-demo-") as folder:
        out = Path(folder, "demo")
        found = run_demo(out, steps=steps)
        if options.figure:
            shutil.copy(out / "curves.png", options.figure)
            print(f"written to {options.figure}")
    empty_batch = Scenario(load_corpus(), steps=steps).empty_batch
    runs = [_as_data(run, empty_batch) for run in found]
    write_json(options.json, {"steps": steps, "runs": runs})


def _as_data(run: DemoRun, empty_batch: int) -> dict[str, Any]:
    skips, clips = run.skips_and_clips()
    return {
        "framework": run.framework,
        "arm": run.arm,
        "loss_before": _strict(run.mean_loss(empty_batch)),
        "held_out_loss": _strict(run.held_out_loss),
        "skips": skips,
        "clips": clips,
        "rollbacks": [
            {"step": event.step, "onset": event.onset, "checkpoint": event.checkpoint}
            for event in run.rollbacks
        ],
        "ending": run.report and run.report.state,
    }


def _strict(value: float) -> float | str:
    """A number, or its name where strict JSON has no number."""
    return value if math.isfinite(value) else str(value)


if __name__ == "__main__":
    main()
