"""Clipping rules, which run on the device at every step.

A rule is a NamedTuple of numbers, which may be arrays. Its methods are `init(groups=n)`, which
gives the state as NumPy arrays, and `update(state, seen, learn, *, xp)`. `update` judges one norm
against the state, then learns it where `learn` holds (the step is not skipped), and returns the new
state and a `Clip`.
"""

from __future__ import annotations

from typing import Any

from healcore.core.clipping.adagc import AdaGCConfig
from healcore.core.clipping.autoclip import AutoClipConfig
from healcore.core.clipping.fixed import Clip as Clip
from healcore.core.clipping.fixed import FixedConfig
from healcore.core.clipping.recent_max import RecentMaxConfig
from healcore.core.clipping.zclip import UpdateClipConfig as UpdateClipConfig
from healcore.core.clipping.zclip import ZClipConfig

RULES: dict[str, Any] = {
    "recent_max": RecentMaxConfig,
    "zclip": ZClipConfig,
    "fixed": FixedConfig,
    "autoclip": AutoClipConfig,
    "adagc": AdaGCConfig,
}
"""Clipping rules by their name in a policy file."""
