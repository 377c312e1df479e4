"""The policies that docs/choose-a-policy.md and docs/evidence.md name can be loaded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from healcore.policy import Policy, load, loads

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("choose-a-policy.md", "evidence.md")


def text(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(page: str) -> list[str]:
    return re.findall(r"^```toml\n(.*?)^```", text(page), flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES)
def test_every_policy_loads(page):
    for block in blocks(page):
        assert isinstance(loads(block, source=f"docs/{page}"), Policy)


@pytest.mark.parametrize("page", PAGES)
def test_every_preset_named_exists(page):
    named = re.findall(r"(?:attach|protect|Callback)\([^()]*?\"([\w.-]+)\"", text(page))
    for name in named:
        assert name == "mine.toml" or load(name)
