"""Writes the page: one self-contained HTML file with curves to zoom into."""

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
    LABELLED,
    MARKERS,
    RunReport,
    by_severity,
    is_wide,
    lane,
)
from healcore.tools.report.sections import overview, page_title, section

_SCRIPT = ("data", "chart", "lines", "marks", "figure", "run", "page")


def render(reports: Sequence[RunReport], *, left_out: int = 0) -> str:
    """A report as self-contained HTML, which may not access the network.

    Only scripts with the page's digest may run: a text from a log could not run even without
    escaping. `left_out` is the number of further runs, with fewer incidents. Raises
    MissingExtraError without jinja2, ValueError without a run.
    """
    if not reports:
        raise ValueError("a report needs at least one run")
    require("report", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined

    reports = by_severity(reports)
    script = _script()
    # A browser hashes the element's text up to the first "</script".
    assert "</script" not in script
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_digest(script)}",
            "style-src 'unsafe-inline'",  # the page's own style sheet
        )
    )
    environment = Environment(
        loader=PackageLoader("healcore.tools.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    # The template escapes every text but healcore's own style and scripts.
    return environment.get_template("page.html").render(
        title=page_title(reports),
        policy=policy,
        style=_part("page.css"),
        overview=overview(reports) if len(reports) > 1 else None,
        left_out=left_out,
        sections=[section(report) for report in reports],
        version=healcore.__version__,
        data={
            "signs": {
                each.outcome: {"done": each.done, "would": each.would, "symbol": each.symbol}
                for each in MARKERS.values()
            },
            "runs": [plot_data(report) for report in reports],
        },
        script=script,
    )


def _script() -> str:
    """The page's script: all parts in one function, so that nothing is global."""
    parts = "\n".join(_part(f"{name}.js") for name in _SCRIPT)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _part(name: str) -> str:
    place = resources.files("healcore.tools.report").joinpath("browser", name)
    return place.read_text(encoding="utf-8")


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


# -- what the script draws -------------------------------------------------------------------------


def plot_data(report: RunReport) -> dict[str, Any]:
    """The data of a run's plot, for JSON."""
    curves = report.curves
    step = curves.step
    places = [incident.onset_step for incident in report.incidents]
    rows, free = lane(places, step, 0.035)
    bad = curves.nonfinite
    return {
        "step": _numbers(step),
        "index": None if curves.index is None else curves.index.tolist(),
        "undone": curves.undone().astype(int).tolist(),
        "attempt": None if curves.attempt is None else curves.attempt.tolist(),
        "loss": _curve(curves.loss),
        "norm": _curve(curves.grad_norm),
        "threshold": _curve(curves.threshold),
        "lr": _curve(curves.lr_scale),
        "bad": [] if bad is None else np.flatnonzero(bad).tolist(),
        "gaps": [{"row": gap.row, "low": gap.low, "high": gap.high} for gap in curves.gaps()],
        "isolated": curves.isolated,
        "would": report.would,
        "logLoss": is_wide(curves.loss),
        "logNorm": is_wide(curves.grad_norm),
        "labelled": len(report.incidents) <= LABELLED,
        "incidents": [
            {
                **_incident(incident, rows[place], report.stop_after_rollback(place)),
                "label": free[place],
            }
            for place, incident in enumerate(report.incidents)
        ],
        "marks": [
            {"x": each.step, "kind": each.kind, "text": _label(mark(each))} for each in report.marks
        ],
    }


def _incident(incident: Incident, row: int, stop: tuple[float, int] | None) -> dict[str, Any]:
    step, index = incident.end
    return {
        "n": incident.number,
        "kind": incident.outcome,
        "x": [incident.onset_step, step],
        "i": None if incident.onset < 0 or index < 0 else [incident.onset, index],
        "stop": None if stop is None else [stop[0], None if stop[1] < 0 else stop[1]],
        "to": incident.checkpoint,
        "row": row,
        "text": f"<b>#{incident.number}</b> step {step_range(incident.onset_step, step)}: "
        f"{_label(flag_names(incident.cause))}<br>{_label(outcome(incident))}",
    }


def _label(text: str) -> str:
    """Escapes a text for the label of a mark."""
    return html.escape(text if len(text) <= 300 else f"{text[:297]}...", quote=False)


def _numbers(values: np.ndarray) -> list[float | int | None]:
    return [_number(x) for x in values.tolist()]


def _number(x: float) -> float | int | None:
    """Six digits; whole numbers as int; None for NaN and Inf, which JSON does not have."""
    if not np.isfinite(x):
        return None
    return int(x) if x == int(x) and abs(x) < 2**53 else float(f"{x:.6g}")


def _curve(values: np.ndarray | None) -> list[float | int | None] | None:
    if values is None or not np.any(np.isfinite(values)):
        return None
    return _numbers(values)
