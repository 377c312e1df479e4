"""Draws the pictures of the pages: `python docs/figures.py` runs the programs, for minutes.

The pictures tutorial-torch, tutorial-jax, spike, restart and report, each for screens and phones,
and report-example.html. `python docs/figures.py tutorial` draws only the first two, in a minute.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "examples")]

import tutorial_curves  # noqa: E402

from examples import loss_spike  # noqa: E402
from healcore.tools.demo import run_demo  # noqa: E402
from healcore.tools.report.figure import WIDTHS, draw  # noqa: E402
from healcore.tools.report.page import render  # noqa: E402
from healcore.tools.report.run_report import read_reports  # noqa: E402


def draw_store(store: Path, name: str) -> None:
    """Writes the figure of the run in a store, for screens and for phones."""
    (report,) = read_reports(store)
    for end, width in {"": 7.2, "-phone": WIDTHS["phone"]}.items():  # inches
        (DOCS / f"{name}{end}.svg").write_text(draw(report, width), encoding="utf-8")


if __name__ == "__main__":
    for framework in ("torch", "jax"):
        tutorial_curves.write(framework, str(DOCS / f"tutorial-{framework}.svg"))
    if sys.argv[1:] == ["tutorial"]:
        sys.exit()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "spike"
        print(loss_spike.train("default", compare=True, store=str(store)))
        draw_store(store, "spike")
        program = [sys.executable, str(DOCS.parent / "examples" / "tutorial_torch.py")]
        program += ["--protection", "healer"]
        subprocess.run([*program, "--kill-at", "390"], cwd=folder, check=False)
        subprocess.run(program, cwd=folder, check=True)
        draw_store(Path(folder) / "tutorial-torch", "restart")
        run_demo(Path(folder) / "demo", frameworks=["torch"])
        store = Path(folder) / "demo" / "torch-healed"
        draw_store(store, "report")
        page = render(read_reports(store)).replace(f"{folder}/demo", "healcore-demo")
        (DOCS / "report-example.html").write_text(page, encoding="utf-8")
