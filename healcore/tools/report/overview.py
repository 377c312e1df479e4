"""The title of a page and, of several stories, the overview at its top."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from healcore.tools.report.counts import counts
from healcore.tools.report.story import Story


def title_of(stories: Sequence[Story]) -> str:
    """The title of a page."""
    if len(stories) == 1:
        return short_names(stories)[0]
    return f"{len(stories)} {'replays' if stories[0].kind == 'replay' else 'runs'}"


def contents(stories: Sequence[Story], left_out: int = 0) -> str:
    """The table of contents, where there is more than one story.

    Args:
        stories: in the order of the page.
        left_out: how many more there are.
    """
    if len(stories) == 1:
        return ""
    replays = all(story.kind == "replay" for story in stories)
    ends = "Ends at" if replays else "Ending"
    names = ("Run", "Policy", "Rows", "Incidents", "Rollbacks", "Skips", "Clips", ends)
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows, short = [], short_names(stories)
    for number, story in enumerate(stories):
        title = escape(story.title)
        link = f'<a href="#s{number}" title="{title}">{escape(short[number])}</a>'
        counted = counts(story)
        rollbacks = ", ".join(each for each in (str(counted.rollbacks), counted.again) if each)
        clips = "–" if counted.clips is None else f"{counted.clips:,}"
        ending = escape(counted.ends.removeprefix("would stop at ") or "–")
        first = (link, escape(story.policy_name), escape(rows_of(story)))
        cells = (*first, counted.incidents, escape(rollbacks), f"{counted.skips:,}", clips, ending)
        told = (
            f'<td data-label="{name}">{cell}</td>' for name, cell in zip(names, cells, strict=True)
        )
        rows.append(f"<tr>{''.join(told)}</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    rest = f"<p>{left_out:,} more, in which least happened, are left out.</p>" if left_out else ""
    return f"<nav>{table}{rest}</nav>"


def short_names(stories: Sequence[Story]) -> list[str]:
    """Names as short as they may be: the end of a path, or all of it where two would be alike."""
    ends = ["/".join(story.title.split("/")[-2:]) for story in stories]
    whole = {end: {s.title for s, e in zip(stories, ends, strict=True) if e == end} for end in ends}
    return [
        end if len(whole[end]) == 1 else story.title
        for story, end in zip(stories, ends, strict=True)
    ]


def rows_of(story: Story) -> str:
    """How many rows a story has, in words."""
    rows = story.series.rows
    return f"{len(story.series.step) if rows is None else rows:,}"
