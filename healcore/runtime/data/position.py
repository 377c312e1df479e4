"""A place in the data as a value that a checkpoint can hold.

Python values only, whatever framework the loader is of: a JAX run may read from a torch loader, and
its store knows no torch tensors. A state with anything else in it is pickled; it is read back only
from a checkpoint whose digests have been verified.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from healcore.runtime.data.errors import DataError

_VERSION = 1


class BatchId(NamedTuple):
    """Names a batch for the whole run; a rewind does not change it."""

    epoch: int
    """From 0."""
    index: int
    """Place among the batches of its epoch, from 0; batches left out count."""


class Position(NamedTuple):
    """Decoded. The next batch is `epoch`, `index`."""

    kind: str
    """Which kind of source the state is of."""
    epoch: int
    index: int
    state: Any
    """The source's own; None: the pass has not begun, or the source has no state."""
    told_epoch: int | None
    """What `set_epoch` was told for this epoch, where known."""


def encode(position: Position, left_out: Iterable[BatchId]) -> dict[str, Any]:
    """As a value for a checkpoint: a copy, of dictionaries, lists, numbers, strings and bytes.

    Args:
        position: the place.
        left_out: batches not to hand out; those still to come go with it.

    Raises:
        Exception: whatever pickling a state raises that cannot be pickled.
    """
    state = position.state
    to_come = sorted(left for left in left_out if left >= (position.epoch, position.index))
    return {
        "version": _VERSION,
        "kind": position.kind,
        "epoch": position.epoch,
        "index": position.index,
        # Pickled even where plain values would do, because that copies: loaders hand out live ones.
        "state": None if state is None else pickle.dumps(state),
        "told_epoch": position.told_epoch,
        "left_out": [list(left) for left in to_come],
    }


def decode(value: Any) -> tuple[Position, frozenset[BatchId]]:
    """The place and the batches left out; every call gives a state of its own.

    Raises:
        DataError: it is no position, or one of another version.
    """
    if not isinstance(value, Mapping) or value.get("version") != _VERSION:
        raise DataError(
            f"a position is what Cursor.position() of version {_VERSION} gave, not {value!r:.80}"
        )
    try:
        state = None if value["state"] is None else pickle.loads(value["state"])
        told = value["told_epoch"]
        (place,) = checked_ids([(value["epoch"], value["index"])])
        told = None if told is None else int(told)
        position = Position(str(value["kind"]), place.epoch, place.index, state, told)
        return position, checked_ids(value["left_out"])
    except DataError:
        raise
    except Exception as error:  # pickle raises anything at all
        raise DataError(
            f"a position that cannot be read: {type(error).__name__}: {error}"
        ) from error


def checked_ids(ids: Iterable[Any]) -> frozenset[BatchId]:
    """Batch ids, also those that come as pairs from JSON.

    Raises:
        DataError: one is not two whole numbers >= 0.
    """
    checked = set()
    for given in ids:
        pair = tuple(given) if isinstance(given, (tuple, list)) else ()
        if len(pair) != 2 or not all(type(part) is int and part >= 0 for part in pair):
            raise DataError(
                f"a batch id is BatchId(epoch, index), whole numbers >= 0, not {given!r}"
            )
        checked.add(BatchId(*pair))
    return frozenset(checked)
