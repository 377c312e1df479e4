"""Clipping rules, which run on the device at every step.

A rule is a NamedTuple of numbers, which may be arrays. `init(groups=n)` returns the state as NumPy
arrays. `update(state, seen, learn, *, xp)` judges a norm against the state, then learns the norm
where `learn` holds (the step is not skipped). It returns the new state and a `Clip`.
"""

from __future__ import annotations

from typing import Any

from healcore.core.clipping.adagc import AdaGCConfig
from healcore.core.clipping.global_norm import AutoClipConfig, FixedConfig, ZClipConfig
from healcore.core.clipping.global_norm import Clip as Clip

RULES: dict[str, Any] = {
    rule.kind: rule for rule in (ZClipConfig, FixedConfig, AutoClipConfig, AdaGCConfig)
}
"""Clipping rules by their name in a policy file."""
