"""A position in the data, as Python values that any checkpoint can hold.

A position is the loader's state at its last capture, and the number of batches since. The loader's
own state is text of `runtime.store.values`, because a JAX run may read from a torch loader, and a
store of JAX cannot save torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError
from healcore.runtime.store import values

VERSION = 2
"""Version of the format of positions."""
MAX_ROWS = 64
_STATE_PATH = ("the loader's state",)


class DataError(HealcoreError, RuntimeError):
    """The data cursor cannot do what was requested. Exceptions of the loader stay unchanged."""


class UnusableLoader(DataError, TypeError):
    """The object is no loader, or has fewer epochs than requested."""


@dataclass(eq=False, repr=False)
class EmptyLoader(DataError):
    """The loader gave no batch in a whole epoch."""

    epoch: int
    loader: str

    def _message(self) -> str:
        hint = "is the dataset empty, or smaller than one batch with drop_last=True?"
        if self.epoch > 0:
            hint = (
                "it can be iterated over only once: pass something that starts again with every "
                "iter(), or epochs=1"
            )
        return f"{self.loader} gave no batch in epoch {self.epoch}: {hint}"


class _Place(NamedTuple):
    epoch: int
    index: int
    """Number of the batch in its epoch; skipped batches count too."""


class BatchId(_Place):
    """Identifies a batch of the whole run by numbers from 0. A rewind does not change it."""

    rows: list[int] | None = None
    """The first `MAX_ROWS` rows of the dataset in a batch that was read, or None if unknown. They
    are no part of the id."""

    def __str__(self) -> str:
        rows = "" if self.rows is None else f" (rows {', '.join(map(str, self.rows))})"
        return f"batch {self.index} of epoch {self.epoch}{rows}"


class Position(NamedTuple):
    """A decoded position."""

    kind: str  # `LoaderAdapter.kind` of the adapter that took the state
    batch: BatchId  # the next batch
    state: Any  # the adapter's, or None if the epoch has not begun or the adapter has no state
    sampler_epoch: int | None  # argument of `set_epoch` for this epoch, or None if unknown
    behind: int  # number of batches between the state and the next batch, to pass again


def of_other_ranks(value: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Converts a position of a run with `ranks` ranks for a run with another number of ranks.

    The loader's state belongs to one rank's part of the data and is not used. The epoch begins
    again, and the batches before the position are read and dropped.
    """
    return {**value, "state": None, "behind": value["index"], "ranks": ranks}


def check_division(value: Mapping[str, Any], division: list[Any] | None, loader: str) -> None:
    """Raises DataError if a position of another number of ranks would select different data."""
    ranks, before = value.get("ranks"), value.get("division")
    if ranks is None or (before is not None and before == division):
        return
    if before is None:
        problem = "how the loader divided the data among the ranks is unknown"
    else:
        now = "an unknown number" if division is None else f"{division[1]} {division[0]}"
        problem = f"the loader had {before[1]} {before[0]}, and {loader} has {now}"
    raise DataError(
        f"the position in the data was saved by {ranks} ranks, and with this number of ranks batch "
        f"{value['index']} has other rows: {problem}. Start the run with {ranks} ranks, or keep "
        "the global batch: with a DistributedSampler keep (batch size) x (number of ranks), or "
        "pass a list of global batches and let every rank take its rows"
    )


def state_to_text(state: Any) -> str | None:
    """A loader's state as text. The text is also a copy: loaders return live objects."""
    return None if state is None else values.dumps(state, _STATE_PATH)


def state_from_text(text: str | None) -> Any:
    """A new copy of the state."""
    return None if text is None else values.loads(text, _STATE_PATH)


def decode(value: Any) -> Position:
    """Decodes a position of a checkpoint or a user; DataError if it cannot be read."""
    if not isinstance(value, Mapping) or value.get("version") != VERSION:
        raise DataError(
            f"a position is a result of Cursor.position() of version {VERSION}, not {value!r:.80}"
        )
    try:
        number, behind = value["told_epoch"], int(value["behind"])
        (batch,) = checked_ids([(value["epoch"], value["index"])])
        if not 0 <= behind <= batch.index:
            raise DataError(f"batch {batch.index} has no {behind} batches before it in its epoch")
        number = None if number is None else int(number)
        return Position(str(value["kind"]), batch, state_from_text(value["state"]), number, behind)
    except DataError:
        raise
    except Exception as error:  # the value may be crafted or damaged
        raise DataError(f"the position cannot be read: {type(error).__name__}: {error}") from error


def checked_ids(ids: Iterable[Any]) -> set[BatchId]:
    """Batch ids from ids or pairs; DataError unless each is two whole numbers >= 0."""
    checked = set()
    for value in ids:
        pair = tuple(value) if isinstance(value, (tuple, list)) else ()
        if len(pair) != 2 or not all(type(part) is int and part >= 0 for part in pair):
            raise DataError(
                f"a batch id is BatchId(epoch, index), whole numbers >= 0, not {value!r}"
            )
        checked.add(BatchId(*pair))
    return checked
