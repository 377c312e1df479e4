"""The page: one HTML file that needs nothing else, with the curves to zoom into."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

import healcore
from healcore.extras import require
from healcore.tools.report import plotdata
from healcore.tools.report.overview import overview, title_of, weight
from healcore.tools.report.report import RunReport
from healcore.tools.report.section import section

_SCRIPT = ("data", "lines", "marks", "figure", "run", "page")


def render(reports: Sequence[RunReport], *, left_out: int = 0) -> str:
    """A report as HTML, self-contained: it asks the network for nothing, and may not.

    Scripts are allowed by their digest only, so that a text out of a log cannot run as one even
    if it were not escaped.

    Args:
        reports: of the runs, one section each; the one in which most happened comes first.
        left_out: how many more there are, in which less happened.

    Raises:
        MissingExtraError: plotly, which draws the curves, or jinja2 is not installed.
        ValueError: there is no run.
    """
    if not reports:
        raise ValueError("a report needs at least one run")
    require("report", "plotly", "jinja2")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    reports = sorted(reports, key=weight)
    library, own = get_plotlyjs(), _script()
    # A browser hashes the element's text as it is; only this would end the element early.
    assert "</script" not in library + own
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(library)}' '{_digest(own)}'",
            "style-src 'unsafe-inline'",  # plotly sets styles on what it draws
            "img-src data: blob:",  # its button that saves the plot as a picture
        )
    )
    runs = [plotdata.plot_data(report) for report in reports]
    data = plotdata.embedded({"signs": plotdata.signs(), "runs": runs})
    environment = Environment(
        loader=PackageLoader("healcore.tools.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    # Ours, or safe within its element; every other text is escaped by the template.
    return environment.get_template("page.html").render(
        title=title_of(reports),
        policy=policy,
        style=Markup(_part("page.css")),
        overview=overview(reports) if len(reports) > 1 else None,
        left_out=left_out,
        sections=[section(report) for report in reports],
        version=healcore.__version__,
        data=Markup(data),
        scripts=[Markup(library), Markup(own)],
    )


def _script() -> str:
    """The page's own script: its parts, with nothing of theirs visible outside."""
    parts = "\n".join(_part(f"{name}.js") for name in _SCRIPT)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _part(name: str) -> str:
    place = resources.files("healcore.tools.report").joinpath("browser", name)
    return place.read_text(encoding="utf-8")


def _digest(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
