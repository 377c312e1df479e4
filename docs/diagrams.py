"""Draws the two diagrams of how-it-decides.md: `python docs/diagrams.py` writes the SVG files.

The pictures have an opaque background and follow the reader's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

STYLE = """
  text { font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 14px }
  text { fill: #1f2933 } .small { font-size: 12.5px; fill: #52606d } .title { font-weight: 600 }
  .page { fill: #ffffff } .panel { fill: #f1f5f8 } .box { fill: #ffffff; stroke: #7b8794 }
  .act { fill: #d5f2ee; stroke: #0f766e } .bad { fill: #fde2e0; stroke: #c0392b }
  .line { stroke: #52606d; stroke-width: 1.5; fill: none } .head { fill: #52606d }
  .loss { stroke-width: 2.5; fill: none } .worse { stroke: #c0392b } .better { stroke: #0f766e }
  .mark { stroke: #9aa5b1; stroke-dasharray: 4 4 } .dot { fill: #0f766e } .gone { fill: #c0392b }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4e7eb } .small { fill: #b8c2cc } .page { fill: #1b2127 }
    .panel { fill: #262e36 } .box { fill: #1b2127; stroke: #9aa5b1 }
    .act { fill: #12423e; stroke: #2dd4bf } .bad { fill: #4f211d; stroke: #f2867a }
    .line { stroke: #b8c2cc } .head { fill: #b8c2cc } .mark { stroke: #7b8794 }
    .worse { stroke: #f2867a } .better { stroke: #2dd4bf } .dot { fill: #2dd4bf }
    .gone { fill: #f2867a }
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
    """A rollback under `default`, with an interval of 100 steps between checkpoints."""

    def at(index: float) -> float:
        return 40 + index * 0.98

    yield text(16, 34, "loss", "title") + text(552, 268, "step", "small", "end")
    yield arrow((40, 244), (552, 244))
    falling = [(0, 62), (40, 100), (100, 134), (200, 166), (310, 186)]
    rising = [(310, 186), (335, 150), (370, 118), (420, 84)]
    after = [(200, 166), (250, 181), (310, 196), (400, 209), (480, 215)]
    for points, kind in ((falling, "better"), (rising, "worse"), (after, "better again")):
        path = " ".join(f"{at(x)},{y}" for x, y in points)
        dashed = ' stroke-dasharray="7 5"' if kind == "better again" else ""
        yield f'<polyline class="loss {kind}" points="{path}"{dashed}/>'
    for index, kind in ((100, "dot"), (200, "dot"), (300, "gone"), (400, "gone")):
        yield f'<circle class="{kind}" cx="{at(index)}" cy="244" r="6"/>'
        yield text(at(index), 268, str(index), "small", "middle")
    marks = ((310, 118, "onset", "end"), (335, 88, "M ≥ evidence", "end"))
    for index, top, words, anchor in marks:
        yield f'<path class="mark" d="M{at(index)} {top} V244"/>'
        yield text(at(index) - 6, top + 4, words, "small", anchor)
    yield f'<path class="mark" d="M{at(420)} 50 V244"/>'
    yield arrow((at(420), 50), (at(200), 50), (at(200), 158))
    yield text(at(310), 40, "roll back to the better weights a", "title", "middle")
    yield text(at(420) + 8, 66, "no recovery", "small") + text(at(420) + 8, 83, "in time", "small")
    yield text(at(378), 224, "time to recover", "small", "middle")
    yield arrow((at(312), 230), (at(419), 230))
    yield text(at(424), 206, "repeated steps", "small")
    yield text(at(200), 288, "a", "title", "middle")
    yield text(at(350), 288, "abandoned: never restored", "small", "middle")

    yield text(at(345) + 8, 158, "worse", "small")
    yield text(16, 326, "then the first that applies:", "title")
    cases = [
        (["rate above each healthy rate:", "limit it"], 16, 340),
        (["otherwise, once:", "repeat unchanged"], 288, 340),
        (["again:", "skip unusual steps"], 16, 400),
        (["a changed setting:", "restore its value"], 288, 400),
        (["still: undo all trials,", "accept the change"], 16, 460),
    ]
    for lines, x, y in cases:
        yield box(x, y, lines, "act", 256)


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    return {
        "step.svg": svg("A step and the work between two steps", 432, 884, step()),
        "rollback.svg": svg("A rollback to better weights", 560, 524, rollback()),
    }


if __name__ == "__main__":
    for name, content in pictures().items():
        (Path(__file__).parent / name).write_text(content)
