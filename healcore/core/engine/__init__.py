"""The engine combines detectors, rules, clipping, incidents, budgets and the LR multiplier."""

from __future__ import annotations

from healcore.core.engine.engine import Engine
from healcore.core.engine.state import (
    BudgetConfig,
    EngineConfig,
    EngineState,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
    StateError,
    Tally,
    neutral,
)

__all__ = [
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
]
