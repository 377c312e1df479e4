"""Numbers with their noun."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """As in "1 run" and "2,000 runs"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
