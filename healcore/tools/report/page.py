"""Renders reports as one self-contained HTML page without scripts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from importlib import resources

import numpy as np

import healcore
from healcore.adapter_registry import require
from healcore.console import counted
from healcore.history import Curves
from healcore.runtime.reporting.diagnosis import unrepaired_text
from healcore.tools.report.figure import WIDTHS, draw
from healcore.tools.report.page_report import (
    PageReport,
    batches_text,
    cause_text,
    response_text,
    step_range,
)

_MAX_DRAWN = 12
"""Limit of runs with a figure."""


def render(reports: Sequence[PageReport]) -> str:
    """Renders reports as a self-contained HTML page.

        reports = read_reports("runs/7")
        Path("report.html").write_text(render(reports), encoding="utf-8")

    The page's Content-Security-Policy forbids scripts and network access. So text from a log could
    not run as a script even without escaping.

    Args:
        reports: the runs, which the page sorts by severity. The first 12 have a figure.

    Returns:
        The text of an HTML file.

    Raises:
        MissingExtraError: jinja2 or matplotlib is not installed.
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("a report needs at least one run")
    require("report", "jinja2", "matplotlib")
    from jinja2 import Environment, StrictUndefined

    severity = operator.attrgetter("counts.rollbacks", "counts.incidents", "counts.skips")
    reports = sorted(reports, key=severity, reverse=True)
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    # Functions for the template, which escapes every text.
    environment.globals |= {
        "batches": batches_text,
        "counted": counted,
        "cause_text": cause_text,
        "losses": _losses,
        "paragraphs": _paragraphs,
        "response_text": response_text,
        "step_range": step_range,
        "unrepaired_text": unrepaired_text,
    }
    template = resources.files("healcore.tools.report").joinpath("page.html")
    figures: list[dict[str, str]] = []  # kind of figure -> SVG, empty for a run without curves
    for report in reports[:_MAX_DRAWN]:
        by_kind: dict[str, str] = {}
        if len(report.curves.step):
            for kind, width in WIDTHS.items():
                by_kind[kind] = draw(report, width)
        figures.append(by_kind)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        reports=reports,
        heading=_heading(reports),
        version=healcore.__version__,
        figures=figures,
    )


def _heading(reports: Sequence[PageReport]) -> str:
    """The title of the page. A run that is replayed with several policies is one run."""
    if len(reports) == 1:
        return reports[0].heading()
    runs = len({report.title for report in reports})
    heading = counted(runs, "run")
    if len(reports) > runs:
        policies = len({report.policy_name for report in reports})
        heading += f", {counted(policies, 'policy', 'policies')}"
    return heading


def _paragraphs(text: str) -> list[str]:
    """The paragraphs of a text whose lines are wrapped. A line that continues one is indented."""
    paragraphs: list[str] = []
    for line in text.splitlines():
        if paragraphs and line.startswith("  "):
            paragraphs[-1] += f" {line.strip()}"
        else:
            paragraphs.append(line.strip())
    return paragraphs


def _losses(curves: Curves) -> np.ndarray:
    """The finite losses that were not undone."""
    return curves.loss[np.isfinite(curves.loss) & ~curves.undone()]
