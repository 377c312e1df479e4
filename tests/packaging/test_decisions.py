"""Each decision says since which release it applies, and whether it is in force."""

import re

from tests.packaging.page_text import DOCS

PAGES = {int(path.name[:4]): path for path in sorted((DOCS / "decisions").glob("0*.md"))}
STATUS = re.compile(
    r"(?P<release>\d+\.\d+\.\d+) - (?P<status>in force|replaced (?:in part )?"
    r"(?:by \[(?P<by>\d+)\]\((?P<page>.*)\)|in (?P<when>.*)))"
)


def status_of(number: int) -> re.Match[str]:
    """The line below the title of a page."""
    lines = PAGES[number].read_text().splitlines()
    assert lines[1] == "", f"decision {number}: the status is a paragraph of its own"
    found = STATUS.fullmatch(lines[2])
    assert found, f"decision {number}: not `0.4.0 - in force`, or a line as in index.md: {lines[2]}"
    return found


def test_each_decision_has_a_release_and_a_status():
    changelog = (DOCS.parent / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", changelog, flags=re.M)
    for number in PAGES:
        found = status_of(number)
        assert found["release"] in releases
        assert found["when"] is None or found["when"] in releases
        if found["by"]:
            assert PAGES[int(found["by"])].name == found["page"]
            assert int(found["by"]) != number


def test_the_index_shows_each_decision_with_its_status():
    rows = []
    for number, path in PAGES.items():
        title = path.read_text().splitlines()[0].removeprefix(f"# {number}. ")
        found = status_of(number)
        status = re.sub(r"\[(\d+)\]\(.*\)", r"\1", found["status"])
        rows.append(f"[{number}]({path.name}) | {title} | {found['release']} | {status}")
    index = (DOCS / "decisions" / "index.md").read_text()
    assert re.findall(r"^\[\d+\]\(.*$", index, flags=re.M) == rows
