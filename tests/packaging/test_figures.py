"""A measured figure of the README or the docs is of a committed result."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from benchmarks import figures
from benchmarks.healbench import __main__ as healbench
from benchmarks.healbench import comparing, running, table

PAGES = figures.pages()
MEASURED = (
    r"\d\s?(?:ms|µs|ns)\b",
    r"\d\s?[GM]B/s",
    r"\b\d+(?:\.\d+)?\s?[x×] (?!\d|10)",
    r"\b(?:twice|half) as (?:fast|slow|long|much)\b",
    r"\b\d[\d,]* out of \d",
    r"\d\s?% (?:slower|faster|higher|lower|worse|better|more|less|of (?:the|a) (?:step|run|time))",
    r"\b(?:adds?|needs?|takes?|took|costs?) (?:about )?\d+(?:\.\d+)?\s?(?:%|s\b|seconds|minutes)",
    r"\b(?:adds?|needs?|takes?|took|costs?) (?:about )?\d+(?:\.\d+)?\s?(?:hours|[GM]B)",
    r"\b\d+\.\d+ times\b",
    r"\b\d+ times (?:slower|faster|as (?:long|fast|slow|much))",
    r"\b\d[\d,]* of (?:\d[\d,]*|all) (?:healthy |sick )?(?:tasks|runs|seeds|events|spikes)",
    r"±\s?\d",
    r"\b(?:slower|faster|higher|lower|worse|better) by (?:about )?\d+(?:\.\d+)? ?(?:%|times)",
)
"""What a measurement looks like in a sentence."""
REVIEWED: dict[str, tuple[str, ...]] = {
    "docs/evidence.md": ("A task is not kept if", "2 % worse"),  # rules
    "docs/data-and-resume.md": ("Saves wait for a slow disk for at most",),  # a limit
    "docs/numbers.md": (".",),  # tests/packaging/test_numbers.py compares it with the code
    # Its own test runs the scripts and compares their output.
    "docs/tutorial.md": (".",),
}
"""Page -> expressions of sentences that quote no measurement, or that another test checks."""
UNCHECKED = re.compile(
    r"<!--=[\w.-]+-->.*?<!--/-->|<!-- (\w+): begin.*?<!-- \1: end -->"
    r"|^```.*?^```|^(?:    [^\n]*\n)+",
    re.S | re.M,
)
"""Figures from results, generated parts, and code."""


def unmarked(text: str, reviewed: tuple[str, ...] = ()) -> Iterator[str]:
    """Sentences and table rows of a page that quote a measurement without a result."""
    text = UNCHECKED.sub("MARKED", text)
    for sentence in re.split(r"\n|(?<=[.;]) ", text):
        quoted = any(re.search(pattern, sentence) for pattern in MEASURED)
        if quoted and not any(re.search(pattern, sentence) for pattern in reviewed):
            yield sentence.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_marked_figure_is_of_the_results(page):
    text = page.read_text()
    assert figures.rendered(text) == text, "run: python -m benchmarks.figures"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_measurement_without_a_result(page):
    name = str(page.relative_to(figures.ROOT))
    if page.parent.name == "decisions":
        pytest.skip("a decision has the figures of its day")
    assert [*unmarked(page.read_text(), REVIEWED.get(name, ()))] == []


def test_a_mark_never_begins_a_line_of_prose():
    """Such a line would be a block of HTML, in which Markdown is not read."""
    for page in PAGES:
        for line in page.read_text().splitlines():
            if line.startswith("<!--=") and not line.endswith("<!--/-->"):
                assert re.fullmatch(r"<!--=[\w.-]+-->", line), f"{page.name}: {line}"
            assert not re.match(r"<!--=.*<!--/-->", line), f"{page.name}: {line}"


def test_the_page_of_healbench_is_of_the_results():
    cells = comparing.compare(running.read_results(healbench.RESULTS), healbench.all_tasks())
    text = table.as_markdown(cells, comparing.rules(cells))
    assert text in healbench.PAGE.read_text(), "run: python -m benchmarks.healbench --report"


def test_a_changed_figure_is_noticed():
    text = (figures.ROOT / "docs" / "evidence.md").read_text()
    (found, *_) = (m for m in figures.MARKED.finditer(text) if m[1] == "promise.rollbacks")
    changed = text.replace(found[0], found[0].replace(found[2], found[2] + "1"))
    assert figures.rendered(changed) == text


@pytest.mark.parametrize(
    "sentence",
    [
        "A save takes 3.2 ms on two cores.",
        "It is 1.27 times the clipped step.",
        "`default` keeps 91 of 93 tasks.",
        "| `attach` | +2.9 ± 4.4 % |",
        "The demo takes 96 s.",
        "Training was slower by 12 %.",
    ],
)
def test_a_measurement_in_a_sentence_is_noticed(sentence):
    assert [*unmarked(f"Text.\n\n{sentence}\n")] == [sentence]
    assert [*unmarked(f"Text.\n\n    {sentence}\n")] == []
    assert [*unmarked(f"Text <!--=x-->{sentence}<!--/-->\n")] == []


@pytest.mark.parametrize(
    "sentence",
    ["At most 30 evaluations per 1,000 steps.", "A rate 16 times too high.", "See 2 of the pages."],
)
def test_a_setting_is_no_measurement(sentence):
    assert [*unmarked(sentence)] == []


def test_text_after_indented_code_is_checked():
    page = "    make test\n\nSome text.\n\n`attach` is 27 % slower than a clip.\n"
    assert [*unmarked(page)] == ["`attach` is 27 % slower than a clip."]
