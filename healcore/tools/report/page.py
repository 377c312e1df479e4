"""Renders reports as one self-contained HTML page, whose curves can be zoomed."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np

import healcore
from healcore.extras import require
from healcore.history import Incident
from healcore.runtime.postmortem.sentences import flag_names, mark, outcome, step_range
from healcore.tools.report.run_report import (
    MARKERS,
    MAX_LABELLED,
    RunReport,
    by_severity,
    is_wide,
    place_markers,
)
from healcore.tools.report.sections import overview, page_title, section

_SCRIPTS = ("data", "chart", "lines", "marks", "figure", "run", "page")


def render(reports: Sequence[RunReport], *, left_out: int = 0) -> str:
    """Renders reports as a self-contained HTML page.

    The page's Content-Security-Policy forbids network access, and scripts other than healcore's
    own. So text from a log could not run as a script even without escaping.

    Args:
        reports: the runs, which the page sorts by severity.
        left_out: number of further runs that the page mentions but does not show.

    Raises:
        MissingExtraError: jinja2 is not installed.
        ValueError: there is no report.
    """
    if not reports:
        raise ValueError("a report needs at least one run")
    require("report", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    reports = by_severity(reports)
    script = _script()
    # The browser hashes the script up to the first "</script".
    assert "</script" not in script
    # 'unsafe-inline' permits the page's own style sheet.
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src 'unsafe-inline'"
    environment = Environment(
        loader=PackageLoader("healcore.tools.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    # The template escapes every text except healcore's own style and scripts.
    return environment.get_template("page.html").render(
        title=page_title(reports),
        policy=policy,
        style=_read("page.css"),
        overview=overview(reports) if len(reports) > 1 else None,
        left_out=left_out,
        sections=[section(report) for report in reports],
        version=healcore.__version__,
        data={
            "signs": {
                m.outcome: {"done": m.done, "would": m.would, "symbol": m.symbol}
                for m in MARKERS.values()
            },
            "runs": [plot_data(report) for report in reports],
        },
        script=script,
    )


def _script() -> str:
    """Returns the page's script: all files in one function, so that no name is global."""
    parts = "\n".join(_read(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _read(name: str) -> str:
    file = resources.files("healcore.tools.report").joinpath("browser", name)
    return file.read_text(encoding="utf-8")


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# -- data of the plots -----------------------------------------------------------------------------


def plot_data(report: RunReport) -> dict[str, Any]:
    """Returns the data of a run's plot for the page's script, as JSON types."""
    curves = report.curves
    step = curves.step
    onsets = [incident.onset_step for incident in report.incidents]
    rows, labelled = place_markers(onsets, step, 0.035)
    nonfinite = curves.nonfinite
    return {
        "step": _numbers(step),
        "index": None if curves.index is None else curves.index.tolist(),
        "undone": curves.undone().astype(int).tolist(),
        "attempt": None if curves.attempt is None else curves.attempt.tolist(),
        "loss": _curve(curves.loss),
        "norm": _curve(curves.grad_norm),
        "threshold": _curve(curves.threshold),
        "lr": _curve(curves.lr_scale),
        "bad": [] if nonfinite is None else np.flatnonzero(nonfinite).tolist(),
        "gaps": [{"row": gap.row, "low": gap.low, "high": gap.high} for gap in curves.gaps()],
        "isolated": curves.isolated,
        "would": report.would,
        "logLoss": is_wide(curves.loss),
        "logNorm": is_wide(curves.grad_norm),
        "labelled": len(report.incidents) <= MAX_LABELLED,
        "incidents": [
            {**_incident(incident, rows[i], report.stop_after_rollback(i)), "label": labelled[i]}
            for i, incident in enumerate(report.incidents)
        ],
        "marks": [{"x": m.step, "kind": m.kind, "text": _label(mark(m))} for m in report.marks],
    }


def _incident(incident: Incident, row: int, stop: tuple[float, int] | None) -> dict[str, Any]:
    step, index = incident.end
    number = f"#{incident.number}" if incident.number else "no incident:"
    return {
        "n": incident.number,
        "kind": incident.outcome,
        "x": [incident.onset_step, step],
        "i": None if incident.onset < 0 or index < 0 else [incident.onset, index],
        "stop": None if stop is None else [stop[0], None if stop[1] < 0 else stop[1]],
        "to": incident.checkpoint,
        "row": row,
        "text": f"<b>{number}</b> step {step_range(incident.onset_step, step)}: "
        f"{_label(flag_names(incident.cause))}<br>{_label(outcome(incident))}",
    }


def _label(text: str) -> str:
    """Shortens and escapes a text for the label of a mark."""
    return html.escape(text if len(text) <= 300 else f"{text[:297]}...", quote=False)


def _numbers(values: np.ndarray) -> list[float | int | None]:
    return [_number(x) for x in values.tolist()]


def _number(x: float) -> float | int | None:
    """Rounds to six digits. NaN and Inf become None, because JSON cannot express them."""
    if not np.isfinite(x):
        return None
    return int(x) if x == int(x) and abs(x) < 2**53 else float(f"{x:.6g}")


def _curve(values: np.ndarray | None) -> list[float | int | None] | None:
    if values is None or not np.any(np.isfinite(values)):
        return None
    return _numbers(values)
