"""Which steps are skipped: non-finite gradients always, finite outliers only so many in a row.

A bad batch is worth a skip. When batch after batch looks bad the cause is not the batches: by then
the spike is sustained, recovery has been ordered, and further skips would keep the run where it is.
So a row of finite skips ends after `max_skips`; the count restarts after an alarm-free step.
"""

from __future__ import annotations

from typing import Any

from healcore.core.signals import Observed


def update(max_skips: Any, run: Any, wished: Any, seen: Observed, *, xp: Any) -> tuple[Any, Any]:
    """Decides the skip of one step.

    Args:
        max_skips: finite steps that may be skipped in a row.
        run: int32, how many were.
        wished: bool, a rule wants to skip.
        seen: the signals; `seen.finite` where all of them are.
        xp: the array namespace.

    Returns:
        The new run and the skip, bool.
    """
    bad = ~seen.finite
    finite = wished & ~bad
    allowed = run < max_skips
    run = xp.where(bad, run, xp.where(finite, xp.where(allowed, run + 1, run), 0))
    skip = (wished & bad) | (finite & allowed)
    if seen.bad_grad is not None:
        skip = skip | seen.bad_grad  # no policy may accept a gradient that is not finite
    return run, skip
