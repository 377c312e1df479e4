"""Clipping rules, one file each, run on the device at every step.

`init(config, *, groups)` gives the state as NumPy arrays.
`update(config, state, seen, learn, *, xp)` judges one norm against the state, then learns it, and
returns `(state, Clip)`.
"""

from __future__ import annotations

from types import ModuleType

from healcore.core.clipping import adagc, autoclip, fixed, recent_max, zclip
from healcore.core.clipping.verdict import Clip

RULES: dict[str, ModuleType] = {
    "recent_max": recent_max,
    "zclip": zclip,
    "fixed": fixed,
    "autoclip": autoclip,
    "adagc": adagc,
}
"""Clipping rules by their name in a policy file."""

__all__ = ["RULES", "Clip"]
