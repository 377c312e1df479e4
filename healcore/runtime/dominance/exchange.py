"""The exchange after all ranks have called the `loss_fn`, which may have raised on one of them."""

from __future__ import annotations

import threading
from typing import Any

from healcore.runtime.store.ranks import Ranks

WAIT_S = 30.0
"""Seconds for which a rank whose call has raised waits for the others to return from theirs: as
long as ranks wait for each other at the end of a run."""


def exchange(ranks: Ranks, item: Any, failure: Exception | None) -> list[Any]:
    """Every rank's item, on every rank.

    Args:
        ranks: which exchange.
        item: of this rank.
        failure: what the call has raised on this rank, or None.

    Raises:
        Exception: `failure`, if the others do not come: they wait for this rank in a collective of
            the forward pass (FSDP, tensor parallel), which no exchange ends. The run has to end as
            after any exception of one rank.
    """
    if failure is None or ranks.world == 1:
        return ranks.gather(item)
    found: list[list[Any]] = []

    def gather() -> None:
        try:
            found.append(ranks.gather(item))
        except Exception as error:  # another rank has ended the connections
            failure.__context__ = error

    thread = threading.Thread(target=gather, name="healcore-loss-fn", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    if not found:
        raise failure
    return found[0]
