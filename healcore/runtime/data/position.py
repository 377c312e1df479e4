"""A place in the data as a value that a checkpoint can hold.

Python values only, whatever framework the loader is of: a JAX run may read from a torch loader, and
its store knows no torch tensors. The loader's own state is text in it, by `healcore.runtime.plain`.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from healcore.runtime import plain
from healcore.runtime.data.errors import DataError
from healcore.runtime.store.errors import pickled

_VERSION = 2
_PICKLED = 1
"""Version of the positions whose state is a pickle: of healcore until it wrote plain values."""
_STATE = ("the loader's state",)


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


def encode(
    position: Position, left_out: Iterable[BatchId], *, trust: bool = False
) -> dict[str, Any]:
    """As a value for a checkpoint: a copy, of dictionaries, lists, numbers and strings.

    Args:
        position: the place.
        left_out: batches not to hand out; those still to come go with it.
        trust: pickle what has no plain form.

    Raises:
        UnsavableState: the loader's state has no plain form.
    """
    state = position.state
    to_come = sorted(left for left in left_out if left >= (position.epoch, position.index))
    return {
        "version": _VERSION,
        "kind": position.kind,
        "epoch": position.epoch,
        "index": position.index,
        "state": None if state is None else frozen(state, trust=trust),
        "told_epoch": position.told_epoch,
        "left_out": [list(left) for left in to_come],
    }


def frozen(state: Any, *, trust: bool = False) -> str:
    """A loader's state as text: a copy, because loaders hand out live ones."""
    return plain.dumps(state, _STATE, trust=trust)


def thawed(text: str, *, trust: bool = False) -> Any:
    """The state again, every time a new one."""
    return plain.loads(text, _STATE, trust=trust)


def is_pickled(value: Any) -> bool:
    """Whether a position is one of before, with a loader's state that is a pickle."""
    return isinstance(value, Mapping) and isinstance(value.get("state"), (bytes, bytearray))


def decode(value: Any, *, trust: bool = False) -> tuple[Position, frozenset[BatchId]]:
    """The place and the batches left out; every call gives a state of its own.

    Args:
        value: from `encode`.
        trust: read what was pickled.

    Raises:
        DataError: it is no position, one of another version, or one with a pickle in it.
    """
    if not isinstance(value, Mapping) or value.get("version") not in (_VERSION, _PICKLED):
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
            state = thawed(state, trust=trust)
        told = value["told_epoch"]
        (place,) = checked_ids([(value["epoch"], value["index"])])
        told = None if told is None else int(told)
        position = Position(str(value["kind"]), place.epoch, place.index, state, told)
        return position, checked_ids(value["left_out"])
    except DataError:
        raise
    except Exception as error:  # crafted or damaged: anything at all
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
