"""The engine combines detectors, rules, clipping, incidents, budgets and the LR multiplier."""

from __future__ import annotations

from healcore.core.engine.config import (
    BudgetConfig,
    EngineConfig,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
)
from healcore.core.engine.engine import Engine
from healcore.core.engine.rule import RuleConfig
from healcore.core.engine.state import EngineState, Tally, neutral
from healcore.core.trees import StateError

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
