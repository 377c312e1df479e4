"""docs/torch.md and docs/jax.md: every snippet runs, and links resolve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("torch.md", "jax.md", "how-it-decides.md")


def blocks(page: str) -> list[str]:
    """The Python snippets of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), flags=re.M | re.S)


def test_the_torch_snippets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    healers, reports = {}, []
    for block in blocks("torch.md"):
        scope: dict[str, Any] = {"print": lambda *values: reports.extend(values)}
        exec(block, scope)  # each snippet has all that it needs
        if "healer" in scope:
            healer = scope["healer"]
            healers[healer.step] = sorted(healer.driver.healings)
            assert healer.report().ending == "completed"
        else:
            assert scope["heal"].metrics()["heal/loss"].isfinite()
    assert healers == {50: ["optimizer"], 20: ["of_D", "of_G"]}
    assert [each.mode for each in reports] == ["heal"]


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_anchors_and_pictures_exist(page):
    """Links to other pages are checked by `make docs`."""
    text = (DOCS / page).read_text()
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]*)\)", text):
        path = DOCS / target if target else DOCS / page
        assert anchor in anchors(path), f"{target}#{anchor}"
    for picture in re.findall(r"!\[[^]]+\]\(([^)#]+)[^)]*\)", text):
        assert (DOCS / picture).exists(), picture
