"""The two guides: policies load, keys exist, links resolve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from healcore.policy import Policy, from_dict, load, loads

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("choose-a-policy.md", "evidence.md")
CLIPS = ("zclip", "fixed")


def text(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", text(page), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_policy_loads(page):
    for block in blocks(page):
        assert isinstance(loads(block, source=f"docs/{page}"), Policy)


def test_there_are_policies():
    assert [len(blocks(page)) for page in PAGES] == [1, 0]


def accepted(dotted: str, value: object) -> bool:
    """Whether a policy file may contain the key with this value."""
    *tables, key = dotted.split(".")
    kinds = CLIPS if tables == ["clip"] else ("",)
    for kind in kinds:
        inner: dict[str, object] = {"kind": kind} if kind else {}
        inner[key] = value
        if dotted == "detect.loss_ratio.window":
            inner["warmup_steps"] = 1
        data: object = inner
        for table in reversed(tables):
            data = {table: data}
        assert isinstance(data, dict)
        rule = {"to": [tables[-1]], "do": ["alert"]} if tables[:1] == ["detect"] else None
        try:
            from_dict({"schema": 1, "name": "x", **data, **({"respond": [rule]} if rule else {})})
        except ValueError:
            continue
        return True
    return False


def test_every_key_of_the_tables_exists():
    found = re.findall(r"`((?:[a-z_]+\.)*[a-z_]+) = ([\d.e-]+)`", text("choose-a-policy.md"))
    dotted = [(key, value) for key, value in found if "." in key]
    assert len(dotted) > 20
    number = {
        key: float(value) if re.search(r"[.e]", value) else int(value) for key, value in dotted
    }
    assert [key for key, value in number.items() if not accepted(key, value)] == []
    assert not accepted("clip.no_such_key", 1)


@pytest.mark.parametrize("page", PAGES)
def test_every_preset_named_exists(page):
    named = re.findall(r"(?:attach|protect|Callback)\([^()]*?\"([\w.-]+)\"", text(page))
    for name in named:
        assert name == "mine.toml" or load(name)


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text(page)):
        path = DOCS / target if target else DOCS / page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"
