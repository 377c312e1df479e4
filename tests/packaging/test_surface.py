"""The public surface, which must not change by accident.

A deliberate change also changes this file and is listed in CHANGELOG.md.
"""

from __future__ import annotations

import importlib

import pytest

# healcore.jax is held by tests/jax/test_surface.py, the pages of all by test_api.py.
SURFACE = {
    "healcore": [
        "Action",
        "Cause",
        "CheckpointStore",
        "Checkpoints",
        "Cursor",
        "DataError",
        "Decision",
        "Fault",
        "HealcoreError",
        "Healer",
        "Hooks",
        "IncidentContext",
        "Keep",
        "Logging",
        "PolicyError",
        "RunStopped",
        "StoreError",
        "Tracker",
        "__version__",
        "classify",
        "errors",
        "jax",
        "policy",
        "retrying",
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
        "AttachError",
        "DCPStore",
        "Healing",
        "HealingCallback",
        "LightningHealingCallback",
        "arctic_callbacks",
        "attach",
        "engine_state",
        "heal_trainer",
        "heal_engine",
    ],
}


@pytest.mark.parametrize("name", SURFACE)
def test_surface(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(SURFACE[name])
    for public in module.__all__:
        assert getattr(module, public) is not None
