"""Draws spike.svg and restart.svg: `python docs/figures.py` runs both programs, for a minute.

The figures are those of `healcore report`, with logarithmic axes, so that undone steps are seen.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from examples import loss_spike  # noqa: E402
from healcore.tools.report.page import STYLE, WIDTHS, plot, to_svg  # noqa: E402
from healcore.tools.report.run_report import read_reports  # noqa: E402


def draw(store: Path, name: str) -> None:
    """Writes the figure of the run in a store, for screens and for phones."""
    (report,) = read_reports(store)
    for end, width in {"": 7.2, "-phone": WIDTHS["phone"]}.items():  # inches
        with mpl.rc_context({**STYLE, "svg.hashsalt": f"{name}{end}"}):
            figure = Figure()
            plot(figure, report, width)
            for axis in figure.axes[1:]:
                lines = [line for line in axis.lines if line.get_transform() == axis.transData]
                values = np.concatenate([np.asarray(line.get_ydata(), float) for line in lines])
                values = values[np.isfinite(values) & (values > 0)]
                axis.set(yscale="log", ylim=(values.min() / 1.5, values.max() * 1.5))
                axis.yaxis.set_major_formatter("{x:g}")
                for text in list(axis.texts):  # "up to": of the curve that left the axis
                    text.remove()
            (DOCS / f"{name}{end}.svg").write_text(to_svg(figure), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "spike"
        print(loss_spike.train("default", compare=True, store=str(store)))
        draw(store, "spike")
        program = [sys.executable, str(DOCS.parent / "examples" / "tutorial_torch.py")]
        program += ["--protection", "healer"]
        subprocess.run([*program, "--kill-at", "390"], cwd=folder, check=False)
        subprocess.run(program, cwd=folder, check=True)
        draw(Path(folder) / "tutorial-torch", "restart")
