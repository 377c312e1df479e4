"""Defines a position in the data as a value that a checkpoint can hold.

Python values only, whatever framework the loader is of: a JAX run may read from a torch loader, and
its store knows no torch tensors. `healcore.runtime.plain` writes the loader's own state as text.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError
from healcore.runtime import plain
from healcore.runtime.store.errors import pickled

_VERSION = 2
_PICKLED_VERSION = 1
"""Positions of this version hold the loader's state as a pickle."""
_STATE_PATH = ("the loader's state",)


class DataError(HealcoreError, RuntimeError):
    """The data cursor refuses or fails. Exceptions of the loader pass through unchanged."""


class BatchId(NamedTuple):
    """Identifies a batch for the whole run (both numbers from 0); a rewind does not change it."""

    epoch: int
    index: int
    """Its number in the epoch; batches that are left out count too."""


class Position(NamedTuple):
    """A decoded position; `epoch` and `index` are of the next batch."""

    kind: str
    """`LoaderAdapter.kind` of the adapter that the state is from."""
    epoch: int
    index: int
    state: Any
    """The adapter's state; None: the epoch has not begun, or the adapter has no state."""
    sampler_epoch: int | None
    """The number that `set_epoch` was called with for this epoch; None: unknown."""
    behind: int = 0
    """How many batches before `index` the state is; they are read again and dropped."""


def encode(
    position: Position,
    left_out: Iterable[BatchId],
    *,
    division: list[Any] | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """A position as a copy of dictionaries, lists, numbers and strings, for a checkpoint.

    Ids of `left_out` that are still ahead are saved too. `division` is that of the loader (see
    `loader_adapters`), `trust` as in `plain.dumps`.
    """
    state = position.state
    return {
        "version": _VERSION,
        "kind": position.kind,
        "epoch": position.epoch,
        "index": position.index,
        "state": None if state is None else state_to_text(state, trust=trust),
        "told_epoch": position.sampler_epoch,
        "behind": position.behind,
        "division": division,
        "left_out": ahead(left_out, BatchId(position.epoch, position.index)),
    }


def of_other_ranks(value: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """A position of a run with that many ranks for one with another number.

    The loader's state is of its part of the data then, and is not used: the epoch begins again, and
    the batches before are read and dropped.
    """
    return {**value, "state": None, "behind": value["index"], "ranks": ranks}


def check_division(value: Mapping[str, Any], division: list[Any] | None, loader: str) -> None:
    """Raises DataError if a position of another number of ranks means other data for a loader."""
    ranks, before = value.get("ranks"), value.get("division")
    if ranks is None or (before is not None and before == division):
        return
    if before is None:
        problem = "it is not known how the loader divided the data among them"
    else:
        now = "nothing of the kind" if division is None else f"{division[1]} {division[0]}"
        problem = f"it had {before[1]} {before[0]} then, and {loader} has {now}"
    raise DataError(
        f"the position in the data was saved by {ranks} ranks, and batch {value['index']} is not "
        f"the same for this number of ranks: {problem}. Start the run with {ranks} ranks, or with "
        "the same global batch: with a DistributedSampler and a batch size that gives as many rows "
        "over all ranks as before, or with a list of batches of which every rank takes its rows"
    )


def ahead(left_out: Iterable[BatchId], batch: BatchId) -> list[list[int]]:
    """The ids from a batch on, as a position holds them."""
    return [list(each) for each in sorted(each for each in left_out if each >= batch)]


def state_to_text(state: Any, *, trust: bool = False) -> str:
    """A loader's state as text: a copy, because loaders return live objects."""
    return plain.dumps(state, _STATE_PATH, trust=trust)


def state_from_text(text: str, *, trust: bool = False) -> Any:
    """Makes a new copy of the state."""
    return plain.loads(text, _STATE_PATH, trust=trust)


def is_pickled(value: Any) -> bool:
    """Whether an encoded position is of version 1, with a pickle as the loader's state."""
    return isinstance(value, Mapping) and isinstance(value.get("state"), (bytes, bytearray))


def decode(value: Any, *, trust: bool = False) -> tuple[Position, frozenset[BatchId]]:
    """Decodes a position (a new state each time) and the batches left out, or raises DataError."""
    if not isinstance(value, Mapping) or value.get("version") not in (_VERSION, _PICKLED_VERSION):
        raise DataError(
            f"a position is what Cursor.position() of version {_VERSION} gave, not {value!r:.80}"
        )
    try:
        state = value["state"]
        if is_pickled(value):
            if not trust:
                raise DataError(str(pickled("the loader's state", plain.HOW)))
            state = pickle.loads(state)
        elif state is not None:
            state = state_from_text(state, trust=trust)
        number = value["told_epoch"]
        number = None if number is None else int(number)
        (batch,) = checked_ids([(value["epoch"], value["index"])])
        behind = int(value.get("behind", 0))
        if not 0 <= behind <= batch.index:
            raise DataError(f"a state {behind} batches before batch {batch.index} is in no epoch")
        position = Position(str(value["kind"]), *batch, state, number, behind)
        return position, checked_ids(value["left_out"])
    except DataError:
        raise
    except Exception as error:  # the value may be crafted or damaged
        raise DataError(
            f"a position that cannot be read: {type(error).__name__}: {error}"
        ) from error


def checked_ids(ids: Iterable[Any]) -> frozenset[BatchId]:
    """Batch ids, also from JSON's pairs; DataError unless each is two whole numbers >= 0."""
    checked = set()
    for given in ids:
        pair = tuple(given) if isinstance(given, (tuple, list)) else ()
        if len(pair) != 2 or not all(type(part) is int and part >= 0 for part in pair):
            raise DataError(
                f"a batch id is BatchId(epoch, index), whole numbers >= 0, not {given!r}"
            )
        checked.add(BatchId(*pair))
    return frozenset(checked)
