"""The public names; the API reference has a page of each, and `nav` every page for users."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import mkdocs_hooks as hooks

DOCS = Path(__file__).parents[2] / "docs"
SURFACE = {
    "healcore": """
        Action Cause CheckpointStore Checkpoints Cursor DataError Decision Fault HealcoreError
        Healer Hooks IncidentContext Keep Logging PolicyError RunStopped StoreError Tracker
        __version__ classify errors jax policy retrying torch
    """,
    "healcore.policy": """
        SCHEMA Difference Overrides Policy PolicyError PolicyLike PolicySource Problem diff dumps
        engine_of fingerprint from_dict load loads preset_names preset_text recipe_names to_dict
    """,
    "healcore.core.engine": """
        BudgetConfig Engine EngineConfig EngineState IncidentConfig LrConfig RollbackConfig
        RuleConfig StateError Tally neutral
    """,
    "healcore.torch": """
        AttachError DCPStore Healing HealingCallback LightningHealingCallback arctic_callbacks
        attach engine_state heal_trainer heal_engine
    """,
}
"""Public names of a module. A deliberate change is listed in CHANGELOG.md too."""


def public_names(module: str) -> list[str]:
    """What a module exports at run time, without modules and `__version__`."""
    loaded = importlib.import_module(module)
    names = hooks.MEMBERS.get(module) or getattr(loaded, "__all__", None)
    if names is None:
        names = [
            name
            for name, each in vars(loaded).items()
            if name[0] != "_" and getattr(each, "__module__", "") == module and callable(each)
        ]
    return [
        name
        for name in names
        if name[:2] != "__" and not isinstance(getattr(loaded, name), ModuleType)
    ]


@pytest.mark.parametrize("module", SURFACE)
def test_the_public_names_do_not_change_by_accident(module):
    assert module in hooks.MODULES
    assert sorted(importlib.import_module(module).__all__) == sorted(SURFACE[module].split())


@pytest.mark.parametrize("module", hooks.MODULES)
def test_every_public_symbol_has_one_page(module):
    """By the identity of the imported object: a page may be in another public module."""
    pages = [getattr(importlib.import_module(each.module), each.name) for each in hooks.symbols()]
    for name in public_names(module):
        symbol = getattr(importlib.import_module(module), name)
        assert sum(each is symbol for each in pages) == 1, f"{module}.{name}"


def test_every_page_is_of_a_public_symbol():
    for each in hooks.symbols():
        assert each.name in public_names(each.module), each.path
        symbol = getattr(importlib.import_module(each.module), each.name)
        if inspect.isclass(symbol) or inspect.isfunction(symbol):
            found = f"{symbol.__module__}.{symbol.__qualname__}"
            assert found == each.definition.path
        assert hooks.summary(each.definition), f"{each.path} has no docstring"


def test_nav_has_every_page_once():
    config = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())
    nav = hooks.on_config({"nav": config["nav"]})["nav"]
    hidden = tuple(config["not_in_nav"].split())

    def pages(entry: Any) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        parts = entry.values() if isinstance(entry, dict) else entry
        return [page for part in parts for page in pages(part)]

    listed = pages(nav)
    assert len(listed) == len(set(listed))
    made = {f"api/{each.page}" for each in hooks.symbols()} | {"api/exceptions.md"}
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(listed) == made | {page for page in written if not page.startswith(hidden)}
