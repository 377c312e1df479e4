"""The public surface: what is in here may not change by accident.

A change on purpose changes this file too, and CHANGELOG.md says so.
"""

from __future__ import annotations

import importlib

import pytest

# healcore.jax is held by tests/jax/test_surface.py.
SURFACE = {
    "healcore": [
        "Action",
        "AlreadyCompleted",
        "Cause",
        "CheckpointDamaged",
        "CheckpointStore",
        "DataError",
        "Decision",
        "EmptyLoader",
        "HealcoreError",
        "Healer",
        "HealerError",
        "Incident",
        "Interrupted",
        "JournalError",
        "Keep",
        "LastGoodKept",
        "LastStateNotSaved",
        "MissingExtraError",
        "NoGoodCheckpoint",
        "NotFinite",
        "NotThere",
        "PolicyError",
        "RankFailed",
        "RunStopped",
        "SaveFailed",
        "SignalError",
        "StateError",
        "StateMismatch",
        "StoreError",
        "StoreInUse",
        "StoreNotEmpty",
        "Terminated",
        "UnknownState",
        "UnsavableState",
        "UnusableLoader",
        "__version__",
        "jax",
        "policy",
        "torch",
    ],
    "healcore.policy": [
        "SCHEMA",
        "Difference",
        "Overrides",
        "Policy",
        "PolicyError",
        "PolicyLike",
        "PolicySource",
        "Problem",
        "diff",
        "dumps",
        "engine_of",
        "fingerprint",
        "from_dict",
        "load",
        "loads",
        "preset_names",
        "preset_text",
        "recipe_names",
        "to_dict",
    ],
    "healcore.core.engine": [
        "BudgetConfig",
        "Engine",
        "EngineConfig",
        "EngineState",
        "IncidentConfig",
        "LrConfig",
        "RollbackConfig",
        "RuleConfig",
        "StateError",
        "Tally",
        "neutral",
    ],
    "healcore.torch": [
        "Action",
        "AttachError",
        "Cause",
        "DCPStore",
        "Decision",
        "Healing",
        "Keep",
        "MemoryStore",
        "ObservedTooLateError",
        "ParametersChangedError",
        "RanksDisagreeError",
        "Report",
        "SignalError",
        "StateError",
        "TieredStore",
        "attach",
    ],
}


@pytest.mark.parametrize("name", SURFACE)
def test_surface(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(SURFACE[name])
    for public in module.__all__:
        assert getattr(module, public) is not None
