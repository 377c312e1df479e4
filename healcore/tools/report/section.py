"""What the page says of one story, in words."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from healcore.tools.report import gaps
from healcore.tools.report.counts import counts
from healcore.tools.report.facts import text_of
from healcore.tools.report.overview import rows_of
from healcore.tools.report.story import Part, Story
from healcore.tools.report.table import incident_table

_ATTEMPTS = 50
"""Attempts that are told one by one."""

_CAPTION = {
    "run": (
        "Faint: steps that a rollback or a restart has undone. A dotted line leads from a rollback "
        "to its checkpoint. Drag to zoom, double-click for everything, click a mark or a row of "
        "the table to find the other."
    ),
    "observed": (
        "The policy only observed: nothing was done to this run. Marks are what it would have "
        "ordered; faint are steps that a restart has undone. Drag to zoom, double-click for "
        "everything, click a mark or a row of the table to find the other."
    ),
    "replay": (
        "A replay: nothing was done to this run. Marks are what the policy would have ordered; "
        "faint are steps that the run itself repeated. Drag to zoom, double-click for everything, "
        "click a mark or a row of the table to find the other."
    ),
}


def section(story: Story, number: int, *, alone: bool) -> str:
    """The section of a story; its plot is drawn by the page's script.

    Args:
        story: what is told.
        number: its place on the page.
        alone: it is the only one; the page's title is its own.
    """
    parts = [
        f'<section id="s{number}">',
        "" if alone else f"<h2>{escape(story.title)}</h2>",
        f"<p>{_badge(story)}policy <b>{escape(story.policy_name)}</b> "
        f"{f'<code>{escape(story.fingerprint)}</code>' if story.fingerprint else ''}</p>",
        _tiles(story),
        _notes(story),
        _diagnosis(story),
        _plot(story),
        f"<h3>Incidents</h3>{incident_table(story.incidents, number, would=story.would)}",
        _policy(story),
        _facts(story),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _badge(story: Story) -> str:
    if story.kind == "replay":
        return '<span class="badge open">replay: nothing was done to this run</span>'
    ending = story.facts.get("Ending", "ending not told")
    observed = ""
    if story.facts.get("Mode") == "observe":
        observed = '<span class="badge open">observed: nothing was done</span>'
    mood = "good" if ending == "completed" else "open" if "running" in ending else "bad"
    return f'<span class="badge {mood}">{escape(ending)}</span>{observed}'


def _tiles(story: Story) -> str:
    counted = counts(story)
    would = "would be " if story.would else ""
    back = "would go back" if story.would else "rollbacks"
    told = [
        (str(counted.incidents), "incident" if counted.incidents == 1 else "incidents"),
        (str(counted.rollbacks), ", ".join(each for each in (back, counted.again) if each)),
        (f"{counted.skips:,}", f"steps {would}skipped"),
        *([(f"{counted.clips:,}", f"steps {would}clipped")] if counted.clips is not None else []),
        *([(f"{story.alarms:,}", "steps with an alarm")] if story.alarms is not None else []),
        (rows_of(story), "rows"),
        *_losses(story),
    ]
    items = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(name)}</span></li>" for value, name in told
    )
    return f'<ul class="tiles">{items}</ul>'


def _losses(story: Story) -> list[tuple[str, str]]:
    """The last one, which need not be finite, and the least."""
    series = story.series
    counts_ = ~series.undone()
    loss = series.loss[np.isfinite(series.loss) & counts_]
    if not len(loss):
        return []
    if series.lonely:
        last = [(f"{loss[-1]:.4g}", "last loss known")]
    else:
        bad = np.zeros(len(counts_), bool) if series.nonfinite is None else series.nonfinite
        known = series.loss[counts_ & (np.isfinite(series.loss) | bad)]
        last = [(f"{known[-1]:.4g}", "last loss")]
        if not np.isfinite(known[-1]):
            last.append((f"{loss[-1]:.4g}", "last finite loss"))
    return [*last, (f"{loss.min():.4g}", "least loss")]


def _notes(story: Story) -> str:
    notes = (*story.notes, *gaps.told(story))
    if not notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div class="notes"><b>To know when reading this</b><ul>{items}</ul></div>'


def _diagnosis(story: Story) -> str:
    if not story.diagnosis:
        return ""
    mood = " calm" if story.facts.get("Ending") == "completed" else ""
    told = "".join(
        f"<p{' class=item' if item else ''}>{escape(p)}</p>" for p, item in _reflowed(story)
    )
    return f'<h3>Diagnosis</h3><div class="diagnosis{mood}">{told}</div>'


def _reflowed(story: Story) -> Iterator[tuple[str, bool]]:
    """The diagnosis's paragraphs, and whether each is an item of a list.

    It is wrapped for a terminal; what begins with a space goes on from the line before.
    """
    open_, item = "", False
    for line in story.diagnosis.splitlines():
        bullet = line.lstrip().startswith("- ")
        if open_ and line.startswith(" ") and not bullet:
            open_ += f" {line.strip()}"
            continue
        if open_:
            yield open_, item
        open_, item = line.strip().removeprefix("- "), bullet
    if open_:
        yield open_, item


def _plot(story: Story) -> str:
    if not len(story.series.step):
        return "<h3>Curves</h3><p>No row with a loss or a gradient norm: nothing to draw.</p>"
    observed = story.kind == "run" and story.would
    return (
        '<h3>Curves</h3><div class="tools"></div>'
        '<div class="plot" role="img" aria-label="Loss, gradient norm and learning-rate multiplier '
        'over the steps, with the incidents marked; the table below has the same incidents."></div>'
        "<noscript><p>The curves are drawn by a script in this file, and scripts are off.</p>"
        f'</noscript><p class="caption">{_CAPTION["observed" if observed else story.kind]}</p>'
    )


def _policy(story: Story) -> str:
    text = text_of(story.policy_name, story.fingerprint) or story.policy_toml
    if not text:
        return ""
    print_ = f" <code>{escape(story.fingerprint)}</code>" if story.fingerprint else ""
    return (
        f"<h3>Policy</h3><details><summary>{escape(story.policy_name)}{print_}</summary>"
        f"<pre>{escape(text)}</pre></details>"
    )


def _facts(story: Story) -> str:
    told = dict(story.facts)
    if len(story.parts) > 1:
        told["Attempts"] = "; ".join(_attempt(story, part) for part in story.parts[:_ATTEMPTS])
        more = len(story.parts) - _ATTEMPTS
        told["Attempts"] += f"; and {more} more" if more > 0 else ""
    if not told:
        return ""
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in told.items()
    )
    return f"<h3>Facts</h3><dl>{items}</dl>"


def _attempt(story: Story, part: Part) -> str:
    count = sum(case.attempt == part.number for case in story.incidents)
    incidents = f"{count or 'no'} incident{'s' * (count > 1)}"
    return f"from step {part.first_step:.0f} ({part.name or part.number}): {incidents}"
