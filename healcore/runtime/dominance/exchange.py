"""Exchanges results of `loss_fn` between ranks, even if `loss_fn` has raised on one rank."""

from __future__ import annotations

import threading
from typing import Any

from healcore.runtime.store.ranks import Ranks

WAIT_S = 30.0
"""Seconds for which a rank whose call has raised waits for the calls of the other ranks."""


def exchange(ranks: Ranks, item: Any, failure: Exception | None) -> list[Any]:
    """Gathers the items of all ranks on every rank.

    Args:
        ranks: the ranks that exchange.
        item: the item of this rank.
        failure: exception of the call on this rank, or None.

    Raises:
        Exception: `failure`, if the other ranks do not answer, because they wait for this rank in a
            collective of the forward pass (FSDP, tensor parallel).
    """
    if failure is None or ranks.world == 1:
        return ranks.gather(item)
    gathered: list[list[Any]] = []

    def gather() -> None:
        try:
            gathered.append(ranks.gather(item))
        except Exception as error:  # another rank has ended the connections
            failure.__context__ = error

    thread = threading.Thread(target=gather, name="healcore-loss-fn", daemon=True)
    thread.start()
    thread.join(WAIT_S)
    if not gathered:
        raise failure
    return gathered[0]
