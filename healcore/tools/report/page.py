"""The page: one HTML file that needs nothing else, with the curves to zoom into."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from importlib import resources

import healcore
from healcore.extras import require
from healcore.tools.report import plotdata
from healcore.tools.report.counts import weight
from healcore.tools.report.overview import contents, title_of
from healcore.tools.report.section import section
from healcore.tools.report.story import Story

_SCRIPT = ("data", "lines", "marks", "figure", "story", "page")


def render(stories: Sequence[Story], *, left_out: int = 0) -> str:
    """A report as HTML, self-contained: it asks the network for nothing, and may not.

    Scripts are allowed by their digest only, so that a text out of a log cannot run as one even
    if it were not escaped.

    Args:
        stories: what is told, one section each; the one in which most happened comes first.
        left_out: how many more there are, in which less happened.

    Raises:
        MissingExtraError: plotly, which draws the curves, is not installed.
        ValueError: there is no story.
    """
    if not stories:
        raise ValueError("a report needs at least one story")
    require("report", "plotly")
    stories = sorted(stories, key=weight)
    from plotly.offline import get_plotlyjs

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
    told = [plotdata.plot_data(story) for story in stories]
    data = plotdata.embedded({"signs": plotdata.signs(), "stories": told})
    alone = len(stories) == 1
    sections = "\n".join(section(story, i, alone=alone) for i, story in enumerate(stories))
    # The parts are put together by `join`: a text from a log is never a format.
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title_of(stories))}</title>",
            f"<style>{_part('page.css')}</style>\n</head>\n<body>",
            f"<header><h1>{escape(title_of(stories))}</h1>{contents(stories, left_out)}</header>",
            f"<main>\n{sections}\n</main>",
            f"<footer>Made by healcore {escape(healcore.__version__)}.</footer>",
            f'<script type="application/json" id="data">{data}</script>',
            f"<script>{library}</script>",
            f"<script>{own}</script>\n</body>\n</html>\n",
        )
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
