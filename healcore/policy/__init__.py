"""Policies: frozen objects that are read from TOML, validated, and turned into engines.

    policy = healcore.policy.load("default")         # or "my.toml"
    policy = healcore.policy.load("default", clip={"max_norm": 1.0})
    engine = policy.engine()

A policy names no framework, so the same file works in all frameworks.
"""

from __future__ import annotations

from healcore.policy.document import (
    SCHEMA,
    Difference,
    Policy,
    diff,
    dumps,
    fingerprint,
    to_dict,
)
from healcore.policy.loader import (
    Overrides,
    PolicyLike,
    PolicySource,
    engine_of,
    load,
    loads,
    preset_names,
    preset_text,
    recipe_names,
)
from healcore.policy.reading import PolicyError, Problem, from_dict

__all__ = [
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
]
