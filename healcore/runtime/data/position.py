"""A position in the data, as Python values that any checkpoint can hold.

A JAX run may read from a torch loader, and its store knows no torch tensors. So
`healcore.runtime.json_codec` writes the loader's own state as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError
from healcore.runtime import json_codec

_VERSION = 2
_STATE_PATH = ("the loader's state",)


class DataError(HealcoreError, RuntimeError):
    """The data cursor cannot do what is asked. Exceptions of the loader are not changed."""


class BatchId(NamedTuple):
    """Identifies a batch in the whole run, with numbers from 0. A rewind does not change it."""

    epoch: int
    index: int
    """Number in the epoch; skipped batches count too."""


class Position(NamedTuple):
    """A decoded position. `epoch` and `index` identify the next batch."""

    kind: str
    """`LoaderAdapter.kind` of the adapter that the state is from."""
    epoch: int
    index: int
    state: Any
    """The adapter's state, or None if the epoch has not begun or the adapter has no state."""
    sampler_epoch: int | None
    """The number that `set_epoch` was called with for this epoch, or None if unknown."""
    behind: int = 0
    """Number of batches between the state and `index`; they are read again and dropped."""


def encode(
    position: Position,
    left_out: Iterable[BatchId],
    *,
    division: list[Any] | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """A position as dictionaries, lists, numbers and strings, for a checkpoint.

    Args:
        position: to encode.
        left_out: ids of skipped batches; ids after this position are saved.
        division: `loader_adapters.division` of the loader.
        trust: as for `json_codec.dumps`.
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
    """A position of a run with `ranks` ranks, for a run with another number of ranks.

    The loader's state belongs to one rank's part of the data and is not used: the epoch begins
    again, and the batches before the position are read and dropped.
    """
    return {**value, "state": None, "behind": value["index"], "ranks": ranks}


def check_division(value: Mapping[str, Any], division: list[Any] | None, loader: str) -> None:
    """Raises DataError if a position of another number of ranks would select other data."""
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
    """The ids of `left_out` from a batch on, as a position holds them."""
    return [list(each) for each in sorted(each for each in left_out if each >= batch)]


def state_to_text(state: Any, *, trust: bool = False) -> str:
    """A loader's state as text, which is also a copy: loaders return live objects."""
    return json_codec.dumps(state, _STATE_PATH, trust=trust)


def state_from_text(text: str, *, trust: bool = False) -> Any:
    """A new copy of the state."""
    return json_codec.loads(text, _STATE_PATH, trust=trust)


def decode(value: Any, *, trust: bool = False) -> tuple[Position, frozenset[BatchId]]:
    """A decoded position, with a new state, and the skipped batches; DataError if unreadable."""
    if not isinstance(value, Mapping) or value.get("version") != _VERSION:
        raise DataError(
            f"a position is what Cursor.position() of version {_VERSION} gave, not {value!r:.80}"
        )
    try:
        state = value["state"]
        if state is not None:
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
    """Batch ids, also from pairs of JSON; DataError unless each is two whole numbers >= 0."""
    checked = set()
    for given in ids:
        pair = tuple(given) if isinstance(given, (tuple, list)) else ()
        if len(pair) != 2 or not all(type(part) is int and part >= 0 for part in pair):
            raise DataError(
                f"a batch id is BatchId(epoch, index), whole numbers >= 0, not {given!r}"
            )
        checked.add(BatchId(*pair))
    return frozenset(checked)
