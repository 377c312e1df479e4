"""Draws the two diagrams of how-it-decides.md: `python docs/diagrams.py` writes the SVG files.

The pictures have an opaque background and follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import log10
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px }
  text { fill: #1f2933 } .small { font-size: 12.5px; fill: #52606d } .title { font-weight: 600 }
  .page { fill: #ffffff } .panel { fill: #f1f5f8 } .box { fill: #ffffff; stroke: #7b8794 }
  .act { fill: #d5f2ee; stroke: #0f766e } .bad { fill: #fde2e0; stroke: #c0392b }
  .line { stroke: #52606d; stroke-width: 1.5; fill: none } .head { fill: #52606d }
  .loss { stroke-width: 2.5; fill: none } .worse { stroke: #c0392b } .better { stroke: #0f766e }
  .mark { stroke: #9aa5b1; stroke-dasharray: 4 4 } .dot { fill: #0f766e }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .small { fill: #b8c2cc } .page { fill: #1b2127 }
    .panel { fill: #262e36 } .box { fill: #1b2127; stroke: #9aa5b1 }
    .act { fill: #12423e; stroke: #2dd4bf } .bad { fill: #4f211d; stroke: #f2867a }
    .line { stroke: #b8c2cc } .head { fill: #b8c2cc } .mark { stroke: #7b8794 }
    .worse { stroke: #f2867a } .better { stroke: #2dd4bf } .dot { fill: #2dd4bf }
  }
"""
HEAD = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
HEAD += 'orient="auto"><path class="head" d="M0 0 L8 4 L0 8 Z"/></marker>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    """A line of text."""
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    """A rectangle with round corners."""
    size = f'width="{width}" height="{height}"'
    return f'<rect class="{kind}" x="{x}" y="{y}" {size} rx="8"/>'


def box(x: float, y: float, lines: list[str], kind: str = "box", width: float = 170) -> str:
    """A box with centred lines; its height is 48."""
    middle = y + 29 - 9 * (len(lines) - 1)
    rows = [
        text(x + width / 2, middle + 18 * row, words, "", "middle")
        for row, words in enumerate(lines)
    ]
    return rect(x, y, width, 48, kind) + "".join(rows)


def arrow(*points: tuple[float, float]) -> str:
    """A line through points, with an arrowhead at the last one."""
    path = " L".join(f"{x} {y}" for x, y in points)
    return f'<path class="line" d="M{path}" marker-end="url(#head)"/>'


def svg(title: str, width: int, height: int, parts: Iterator[str]) -> str:
    """A whole picture; `title` is its alternative text."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<defs>{HEAD}</defs>\n"
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>\n{body}\n</svg>\n'
    )


def step() -> Iterator[str]:
    """What happens in a step, and between two steps."""
    left = right = 32  # one panel above the other, so that a phone shows readable text
    yield rect(16, 16, 400, 364, "panel") + text(left, 42, "in each step, on the device", "title")
    yield rect(16, 412, 400, 456, "panel")
    yield text(134, 438, "between two steps, on the host", "title")
    rows = [60, 144, 228, 312]

    asks = [["loss, gradient norm"], ["NaN or Inf?"], ["with clip=: norm", "above max_norm?"]]
    for y, lines in zip(rows, [*asks, ["optimizer step"]], strict=True):
        yield box(left, y, lines)
    for y in rows[:3]:
        yield arrow((left + 85, y + 48), (left + 85, y + 84))
    for y, lines in ((rows[1], ["skip the step:", "nothing changes"]), (rows[2], ["clip"])):
        yield arrow((left + 170, y + 24), (left + 200, y + 24))
        yield text(left + 185, y + 17, "yes", "small", "middle")
        yield box(left + 200, y, lines, "act", 152)
    for y in rows[1:3]:
        yield text(left + 93, y + 70, "no", "small")
    yield arrow((left + 352, rows[1] + 24), (400, rows[1] + 24), (400, 396), (left + 93, 396))
    yield arrow((left + 276, rows[2] + 48), (left + 276, rows[3] + 24), (left + 170, rows[3] + 24))

    yield arrow((left + 85, rows[3] + 48), (left + 85, 464))
    rows = [464, 548, 632, 716, 800]
    asks = [["read losses, alarms", "and orders"], ["alarm, high loss, or", "every 100 steps?"]]
    asks += [["evidence that the", "model is worse?"], ["checkpoint due?"], ["next step"]]
    for y, lines in zip(rows, asks, strict=True):
        yield box(right, y, lines)
    for y in rows[:4]:
        yield arrow((right + 85, y + 48), (right + 85, y + 84))
    acts = [["compare with", "earlier weights"], ["roll back", "(or stop the run)"], ["save"]]
    for y, lines in zip(rows[1:4], acts, strict=True):
        yield arrow((right + 170, y + 24), (right + 200, y + 24))
        yield text(right + 185, y + 17, "yes", "small", "middle")
        yield box(right + 200, y, lines, "act", 152)
    for y in rows[1:4]:
        yield text(right + 93, y + 70, "no", "small")
    yield arrow(
        (right + 276, rows[3] + 48), (right + 276, rows[4] + 16), (right + 170, rows[4] + 16),
    )  # fmt: skip
    yield arrow(
        (right + 352, rows[2] + 24), (400, rows[2] + 24), (400, rows[4] + 34),
        (right + 170, rows[4] + 34),
    )  # fmt: skip
    yield arrow(
        (right + 276, rows[1] + 48), (right + 276, rows[1] + 66), (right + 140, rows[1] + 66),
        (right + 140, rows[2]),
    )  # fmt: skip


def rollback() -> Iterator[str]:
    """The tutorial's run under `default`, as a sketch: the curves are straight lines."""

    def at(index: float) -> float:
        return 60 + (index - 290) * 2.5

    def line(points: Sequence[tuple[float, float]], height: float, decade: float, kind: str) -> str:
        """A curve through (step, value), with a logarithmic axis whose value 1 is at `height`."""
        path = " ".join(f"{at(x):g},{height - decade * log10(y):.1f}" for x, y in points)
        dashed = ' stroke-dasharray="7 5"' if "again" in kind else ""
        return f'<polyline class="loss {kind}" points="{path}"{dashed}/>'

    signs = ((300, "checkpoint", ""), (351, "alarm", ""), (370, "damage", "found"))
    signs += ((402, "compare", "again"), (421, "roll", "back"))
    for index, words, more in signs:
        yield text(at(index), 26, str(index), "title", "middle")
        yield text(at(index), 44, words, "small", "middle") + text(
            at(index), 59, more, "small", "middle"
        )
        yield f'<path class="mark" d="M{at(index)} 66 V232 M{at(index)} 258 V352"/>'
    yield f'<rect class="panel" x="{at(370)}" y="66" width="{at(402) - at(370)}" height="286"/>'
    for top, words in ((302, "M waits"), (326, "time to"), (341, "recover")):
        yield text(at(386), top, words, "small", "middle")

    yield text(16, 72, "loss", "title")
    for value, words in ((100, "100"), (10, "10"), (1, "1"), (0.1, "0.1")):
        yield text(52, 154 - 32 * log10(value), words, "small", "end")
    healthy, worse = [(290, 0.1), (351, 0.1)], [(351, 0.1), (353, 200), (356, 40)]
    yield line(healthy, 150, 32, "better")
    yield line([*worse, (380, 60), (402, 7), (421, 6)], 150, 32, "worse")
    yield line([(300, 0.1), (435, 0.1)], 158, 32, "better again")
    yield text(at(366), 142, "first attempt", "small") + text(at(376), 205, "repeat", "small")
    yield text(at(325.5), 172, "healthy", "small", "middle")
    yield f'<circle class="dot" cx="{at(300)}" cy="182" r="6"/>'
    yield arrow((at(421), 212), (at(300), 212), (at(300), 196))
    yield text(at(351) - 5, 229, "restore, limit the rate", "small", "end")

    yield text(16, 250, "evidence M", "title")
    for value, words in ((1e4, "10,000"), (100, "100"), (1, "1")):
        yield text(52, 354 - 20 * log10(value), words, "small", "end")
        yield f'<path class="mark" d="M60 {350 - 20 * log10(value)} H422"/>'
    rises: list[tuple[float, float]] = [
        (290, 1),
        (351, 1),
        (370, 1e4),
        (370, 100),
        (402, 100),
        (421, 1e4),
    ]
    yield line([*rises, (421, 1)], 350, 20, "worse")
    yield text(422, 376, "step", "small", "end")
    yield text(
        216,
        394,
        "sketch: the steps are those of the run, the curves are simplified",
        "small",
        "middle",
    )
    for index in (300, 350, 400):
        yield text(at(index), 376, str(index), "small", "middle")


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {
        "step.svg": svg("A step and the work between two steps", 432, 884, step()),
        "rollback.svg": svg("A rollback to better weights, as a sketch", 432, 404, rollback()),
    }


if __name__ == "__main__":
    for name, content in pictures().items():
        (Path(__file__).parent / name).write_text(content)
