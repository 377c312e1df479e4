"""Skipped and soft steps: non-finite gradients always, outliers at most `max_skips` in a row.

When batch after batch looks bad, the batches are not the cause: the spike is sustained by then, a
recovery has been ordered, and more skips would not help. The count restarts after an alarm-free
step.
"""

from __future__ import annotations

from typing import Any

from healcore.core.signals import Observed


def update(max_skips: Any, run: Any, wished: Any, seen: Observed, *, xp: Any) -> tuple[Any, Any]:
    """The new number of finite skips in a row, and the skip; `wished`: a rule wants to skip."""
    bad = ~seen.finite
    finite = wished & ~bad
    allowed = run < max_skips
    run = xp.where(bad, run, xp.where(finite, xp.where(allowed, run + 1, run), 0))
    skip = (wished & bad) | (finite & allowed)
    if seen.bad_grad is not None:
        skip = skip | seen.bad_grad  # whatever the policy
    return run, skip


def update_soft(
    max_skips: Any, run: Any, wished: Any, soft_wished: Any, seen: Observed, *, xp: Any
) -> tuple[Any, Any, Any]:
    """`update` where rules may order soft steps too, which count alike: (run, skip, soft step).

    A skip that another rule orders has precedence.
    """
    run, held = update(max_skips, run, wished | soft_wished, seen, xp=xp)
    skip = held & wished
    if seen.bad_grad is not None:
        skip = skip | seen.bad_grad
    return run, skip, held & ~skip
