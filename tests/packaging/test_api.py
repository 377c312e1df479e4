"""The public names and errors; each has a page of the API reference, and `nav` has every page."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import healcore
import mkdocs_hooks as hooks
from healcore.policy import Overrides
from healcore.runtime.run_options import AttachOptions, HealerOptions, Options

DOCS = Path(__file__).parents[2] / "docs"
SURFACE = {
    "healcore": """
        Action Cause CheckpointStore Checkpoints Cursor DataError Decision Fault HealcoreError
        Healer Hooks IncidentContext Keep Logging PolicyError RunStopped StoreError Tracker
        __version__ classify errors jax policy retrying start torch
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
INTERNAL = {
    "NotRecordable", "UnsplittableBatch", "RolledBack", "WeightsChanged",
    "NotComparable",
}  # fmt: skip
"""Errors that are raised and caught within healcore; nobody outside ever sees one."""
OF_COMMANDS = ("healcore.tools.", "healcore.checkpoint_contents")
"""Modules whose errors reach a command, which prints them with an exit code, or a test."""
HOMES = ("healcore", "healcore.errors", "healcore.jax", "healcore.torch", "healcore.policy")
ENDS = {
    "RunStopped", "AlreadyCompleted", "EndRequested", "IncompleteRun", "LastStateNotSaved",
    "Terminated", "Interrupted", "NoGoodCheckpoint",
}  # fmt: skip


pytestmark = pytest.mark.filterwarnings("ignore:healcore.Cursor:DeprecationWarning")


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


def test_every_public_symbol_has_one_page_and_every_page_is_of_one():
    """By the identity of the imported object: a page may be in another public module."""
    pages = [getattr(importlib.import_module(each.module), each.name) for each in hooks.symbols()]
    for module in hooks.MODULES:
        for name in public_names(module):
            symbol = getattr(importlib.import_module(module), name)
            assert sum(each is symbol for each in pages) == 1, f"{module}.{name}"
    for each in hooks.symbols():
        assert each.name in public_names(each.module), each.path
        symbol = getattr(importlib.import_module(each.module), each.name)
        if inspect.isclass(symbol) or inspect.isfunction(symbol):
            found = f"{symbol.__module__}.{symbol.__qualname__}"
            written = each.definition.path
            if hooks.is_exception(each.definition):  # a traceback names where to import it
                written = each.path
            assert found == written
        assert hooks.summary(each.definition), f"{each.path} has no docstring"


MODULES_WITH_EXAMPLES = (
    "healcore",
    "healcore.torch",
    "healcore.torch.store",
    "healcore.policy",
    "healcore.jax",
    "healcore.jax.flax_nnx",
    "healcore.jax.flax_linen",
)
NEVER_MADE = {
    "Action", "Cause", "Decision", "Cursor", "Difference", "Problem", "PolicyLike", "PolicySource",
    "SCHEMA",
}  # fmt: skip
"""Types, constants, and results that a program reads and never makes."""


def test_each_entry_point_begins_with_an_example():
    """After the summary, before the arguments; it is Python without a doctest's marks."""
    for symbol in hooks.symbols():
        if symbol.module not in MODULES_WITH_EXAMPLES or symbol.name in NEVER_MADE:
            continue
        if hooks.is_exception(symbol.definition):
            continue
        found = getattr(importlib.import_module(symbol.module), symbol.name)
        before_arguments = re.split(r"^\w+:$", inspect.getdoc(found) or "", flags=re.M)[0]
        code = re.findall(r"(?:^    .*\n?|^\n)+", before_arguments, flags=re.M)
        examples = [ast.parse(textwrap.dedent(each)).body for each in code if each.strip()]
        assert any(examples), f"{symbol.path} has no example"


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
    made = {f"api/{each.page}" for each in hooks.symbols()}
    made |= {f"api/{module}.md" for module in hooks.MODULES}
    made |= {"api/exceptions.md", "api/types.md"}
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(listed) == made | {page for page in written if not page.startswith(hidden)}


def test_what_the_reference_lists_first_and_explains_exists():
    for module, names in hooks.FIRST.items():
        own = [each.name for each in hooks.symbols() if each.module == module]
        assert own[: len(names)] == names
    for module, names in hooks.TYPES.items():
        for name in names:
            assert hasattr(importlib.import_module(module), name)
            assert hooks.summary(hooks.Definition(module, name)), f"{module}.{name}"


def error_classes() -> set[type[BaseException]]:
    """The public exception classes of all modules of healcore."""
    found: set[type[BaseException]] = set()
    for module in pkgutil.walk_packages(healcore.__path__, "healcore."):
        for member in vars(importlib.import_module(module.name)).values():
            if not inspect.isclass(member) or not issubclass(member, BaseException):
                continue
            is_ours = member.__module__.startswith("healcore")
            if is_ours and not member.__name__.startswith("_"):
                found.add(member)
    return found


def test_each_error_has_the_base_and_can_be_imported_from_a_top_level_module():
    errors = error_classes()
    assert {error.__name__ for error in errors} >= INTERNAL | ENDS | {"PolicyError"}
    for error in errors:
        name = error.__name__
        if name in INTERNAL | {"HealcoreError"}:
            continue
        assert issubclass(error, healcore.HealcoreError)
        assert issubclass(error, SystemExit) == (name in ENDS)
        if not error.__module__.startswith(OF_COMMANDS):
            homes = [home for home in map(importlib.import_module, HOMES) if name in home.__all__]
            assert homes, f"{error.__module__}.{name}: export it from one of {HOMES}"
            assert all(getattr(home, name) is error for home in homes)


def test_the_reference_shows_defaults_as_values():
    shown = {name: hooks.value_of("healcore.runtime.healer", name) for name in
             ("CHECKPOINTS", "LOGGING", "NO_HOOKS", "FORWARD_PASS")}  # fmt: skip
    assert shown == {
        "CHECKPOINTS": "Checkpoints()",
        "LOGGING": "Logging()",
        "NO_HOOKS": "Hooks()",
        "FORWARD_PASS": "1 / 3.0",
    }
    assert hooks.value_of("healcore.jax.transform", "DEFAULT_RECORDS") == "64"
    assert hooks.value_of("healcore.jax.transform", "NO_SUCH_NAME") is None


def test_the_arguments_of_a_healer_are_the_same_in_its_three_lists():
    """The signature for the reference, the keywords of `start`, and the checked options."""
    signature = inspect.signature(healcore.Healer)
    arguments = set(signature.parameters) - {"overrides"}
    keywords = set(HealerOptions.__annotations__) - set(Overrides.__annotations__)
    options = {each.name for each in dataclasses.fields(Options)}
    assert arguments == options == keywords | {"policy", "state"}


def test_a_healer_takes_the_options_of_attach():
    """By name: the types of torch are written as `Any`, so that only the names can be compared."""
    pytest.importorskip("torch")
    signature = inspect.signature(healcore.torch.attach)
    assert set(AttachOptions.__annotations__) == set(signature.parameters) - {
        "optimizer",
        "policy",
        "overrides",
    }
