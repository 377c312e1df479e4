"""Policies: frozen objects read from TOML, checked whole, and turned into engines.

    policy = healcore.policy.load("default")         # or "my.toml"
    policy = healcore.policy.load("default", clip={"max_norm": 1.0})
    engine = policy.engine()

Nothing in a policy names a framework: porting it is copying the file.
"""

from __future__ import annotations

from healcore.policy.difference import Difference, diff
from healcore.policy.document import SCHEMA, Policy
from healcore.policy.dumping import dumps, to_dict
from healcore.policy.errors import PolicyError, Problem
from healcore.policy.fingerprint import fingerprint
from healcore.policy.loading import PolicySource, from_dict, load, loads
from healcore.policy.overriding import Overrides
from healcore.policy.presets import preset_names, preset_text, recipe_names
from healcore.policy.resolver import PolicyLike, engine_of

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
