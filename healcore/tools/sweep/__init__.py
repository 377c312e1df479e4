"""Replays variants of one policy on recorded runs, and counts what each would have done."""

from __future__ import annotations

from healcore.tools.sweep.variants import SweepError, variants

__all__ = ["SweepError", "variants"]
