"""Positions that another number of ranks has saved: when they still mean the same data.

Each rank reads its own part of an epoch. With another number of ranks the parts differ, and with
them the state of each rank's loader. What can stay equal is batch i of the epoch over all ranks
together. Then the epoch begins again on every rank, and the batches before the position are read
and dropped:

    saved by 4 ranks, 8 rows each:  batch 7 = rows 224 to 255 of the epoch's order
    2 ranks, 16 rows each:          batch 7 = rows 224 to 255: the run continues there
    2 ranks, 8 rows each:           batch 7 = rows 112 to 127: DataError
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from healcore.runtime.data.loader_parts import is_type, samplers_of
from healcore.runtime.data.loader_protocols import AnyLoader
from healcore.runtime.data.positions import DataError, Division, SavedPosition

GLOBAL_ROWS = "rows of a global batch"
"""Kind of the division of a loader whose sampler divides the data among the ranks."""


def division(loader: AnyLoader) -> Division | None:
    """What has to stay equal when a run continues with another number of ranks.

    If it is equal, batch i of every epoch has the same rows as before, over all ranks together. The
    unit is batches if every rank reads the same ones (a list, a loader in order), else rows of a
    global batch.

    Args:
        loader: the user's loader.

    Returns:
        [unit, number], or None if it is unknown.
    """
    if isinstance(loader, Sequence):
        return ["batches", len(loader)]
    batch_sampler = getattr(loader, "batch_sampler", None)
    rows = getattr(batch_sampler, "batch_size", None)
    for sampler in samplers_of(loader):
        replicas = getattr(sampler, "num_replicas", None)
        distributed = sampler is not batch_sampler and hasattr(sampler, "set_epoch")
        if distributed and type(rows) is int and type(replicas) is int:
            return [GLOBAL_ROWS, rows * replicas]
        if is_type(sampler, "torch.utils.data", "SequentialSampler") and hasattr(loader, "__len__"):
            return ["batches", len(loader)]
    return None


def position_of_other_ranks(value: Mapping[str, Any], ranks: int) -> SavedPosition:
    """Converts a position of a run with `ranks` ranks for a run with another number of ranks.

    The loader's state belongs to one rank's part of the data and is not used. The epoch begins
    again, and the batches before the position are read and dropped.

    Args:
        value: a position of rank 0.
        ranks: number of ranks of the run that has saved the position.

    Returns:
        A position with the key `ranks`, which `check_division` reads.
    """
    return {**value, "state": None, "behind": value["index"], "ranks": ranks}


def check_division(value: Mapping[str, Any], division: Division | None, loader: str) -> None:
    """Checks that a position of another number of ranks selects the same data.

    Without this check, a run that continues on fewer ranks would repeat some rows of the epoch and
    never read others, without a sign of it.

    Args:
        value: a position, with `ranks` if `position_of_other_ranks` has made it.
        division: result of `division` for the live loader.
        loader: name of the live loader, for the message.

    Raises:
        DataError: the batch of the position has other rows now.
    """
    ranks, before = value.get("ranks"), value.get("division")
    if ranks is None or (before is not None and before == division):
        return
    if before is None:
        problem = "how the loader divided the data among the ranks is unknown"
    else:
        now = "an unknown number"
        if division is not None:
            now = f"{division[1]} {division[0]}"
        problem = f"the loader had {before[1]} {before[0]}, and {loader} has {now}"
    advice = "pass a list of global batches and let every rank take its rows"
    if before is not None and before[0] == GLOBAL_ROWS:
        advice = f"keep (batch size) x (number of ranks), or {advice}"
    raise DataError(
        f"the position in the data was saved by {ranks} ranks, and with this number of ranks batch "
        f"{value['index']} has other rows: {problem}. Start the run with {ranks} ranks, or {advice}"
    )
