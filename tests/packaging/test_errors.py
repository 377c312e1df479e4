"""Every exception class of the package: its base, its builtin base, where to import it from."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pkgutil
from collections.abc import Iterator
from types import ModuleType

import pytest

import healcore

# Raised and caught within healcore; nobody outside ever sees one.
INTERNAL = {
    "StepSkipped", "ChecksumError", "NotRecordable", "NotProvided",
    "CannotShrink", "EpochChanged", "ProgramExit", "WeightsChanged",
}  # fmt: skip
HOMES = ("healcore", "healcore.errors", "healcore.jax", "healcore.torch", "healcore.policy")
ENDS = {
    "RunStopped", "AlreadyCompleted", "EndRequested", "IncompleteRun", "LastStateNotSaved",
    "Terminated", "Interrupted",
}  # fmt: skip


NOT_INSTALLED = {"arctic_training"}
"""Libraries that are not in the test environment: .ci/run installs them apart."""


def modules() -> Iterator[ModuleType]:
    for module in pkgutil.walk_packages(healcore.__path__, "healcore."):
        try:
            yield importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in NOT_INSTALLED:
                raise


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


# The commands print theirs, with an exit code; those of plugins reach a command or a test.
OF_COMMANDS = ("healcore.tools.", "healcore.demo.", "healcore.plugins.")


def test_the_walk_finds_them():
    names = {each.__name__ for each in CLASSES}
    assert names >= INTERNAL | ENDS | {"PolicyError", "CheckpointDamaged", "AttachError"}


@pytest.mark.parametrize("error", RAISED, ids=lambda each: each.__name__)
def test_it_is_a_healcore_error_and_what_python_has_for_it(error):
    assert issubclass(error, healcore.HealcoreError)
    if error.__name__ in ENDS:
        assert issubclass(error, SystemExit)
        assert not issubclass(error, Exception)
    else:
        builtin = {base.__name__ for base in error.__mro__ if base.__module__ == "builtins"}
        assert builtin & {
            "ValueError", "TypeError", "RuntimeError", "OSError", "ImportError", "LookupError",
        }  # fmt: skip


@pytest.mark.parametrize(
    "error",
    [each for each in RAISED if not each.__module__.startswith(OF_COMMANDS)],
    ids=lambda each: each.__name__,
)
def test_it_can_be_imported_from_a_top_level_module(error):
    homes = [home for home in HOMES if error.__name__ in importlib.import_module(home).__all__]
    assert homes, f"{error.__module__}.{error.__name__}: export it from one of {HOMES}"
    for home in homes:
        assert getattr(importlib.import_module(home), error.__name__) is error


def test_the_base_changes_nothing_of_the_builtin_one():
    error = healcore.errors.RankFailed(28, "No space left on device")
    assert (error.errno, error.strerror) == (28, "No space left on device")
    assert healcore.errors.AlreadyCompleted("done").code == 0
    again = pickle.loads(pickle.dumps(healcore.errors.CheckpointNotFound(3, (1, 2), "memory")))
    assert str(again) == str(healcore.errors.CheckpointNotFound(3, (1, 2), "memory"))
