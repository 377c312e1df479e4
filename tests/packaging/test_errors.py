"""Every exception class of the package: its base, and where to import it from."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import healcore

# Raised and caught within healcore; nobody outside ever sees one.
INTERNAL = {
    "ChecksumError", "NotRecordable",
    "UnsplittableBatch", "EpochChanged", "WeightsChanged",
    "RuleBroken",
}  # fmt: skip
HOMES = ("healcore", "healcore.errors", "healcore.jax", "healcore.torch", "healcore.policy")
ENDS = {
    "RunStopped", "AlreadyCompleted", "EndRequested", "IncompleteRun", "LastStateNotSaved",
    "Terminated", "Interrupted",
}  # fmt: skip


def modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(healcore.__path__, "healcore."):
        yield importlib.import_module(module.name)


def exception_classes() -> list[type[BaseException]]:
    found = {}
    for module in modules():
        for name, each in vars(module).items():
            is_error = inspect.isclass(each) and issubclass(each, BaseException)
            if is_error and each.__module__.startswith("healcore") and name[0] != "_":
                found[f"{each.__module__}.{name}"] = each
    return list(found.values())


CLASSES = exception_classes()
RAISED = [each for each in CLASSES if each.__name__ not in INTERNAL | {"HealcoreError"}]


# The commands print theirs, with an exit code; those of readers reach a command or a test.
OF_COMMANDS = ("healcore.tools.", "healcore.demo.", "healcore.checkpoint_contents")


def test_each_has_the_base_and_can_be_imported_from_a_top_level_module():
    assert {each.__name__ for each in CLASSES} >= INTERNAL | ENDS | {"PolicyError"}
    for error in RAISED:
        assert issubclass(error, healcore.HealcoreError)
        assert issubclass(error, SystemExit) == (error.__name__ in ENDS)
        if not error.__module__.startswith(OF_COMMANDS):
            homes = [h for h in map(importlib.import_module, HOMES) if error.__name__ in h.__all__]
            assert homes, f"{error.__module__}.{error.__name__}: export it from one of {HOMES}"
            assert all(getattr(home, error.__name__) is error for home in homes)
