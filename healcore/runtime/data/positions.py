"""Positions in the data: the ids of batches, and what a checkpoint holds of a loader.

A position is the loader's state at some moment, and the number of batches since then:

    batches    0   1   2   3   4   5
                       ^       ^
                 state taken   next batch: index 4, behind 2

A rewind sets the state, and then reads and drops `behind` batches. Usually `behind` is 0. The
distance is needed for loaders whose state cannot be taken between any two batches.

A position consists of Python values that any checkpoint can hold. The loader's own state is text of
`runtime.store.values`, because a JAX run may read from a torch loader, and a store of JAX cannot
save torch tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from healcore.core.errors import HealcoreError
from healcore.events.schema import rows_text
from healcore.runtime.data.loader_protocols import LoaderState
from healcore.runtime.store import values

POSITION_VERSION = 2
"""Version of the format of positions. A position of another version is not read."""
_STATE_PATH = ("the loader's state",)

SavedPosition = dict[str, Any]
"""A position as JSON-safe values, see `encode_position`."""
Division = list[Any]
"""What has to stay equal for another number of ranks, see `loader_epoch.division`."""
GLOBAL_ROWS = "rows of a global batch"
"""Kind of the division of a loader whose sampler divides the data among the ranks."""


class DataError(HealcoreError, RuntimeError):
    """The data cursor cannot do what was requested.

    Exceptions of the user's loader propagate unchanged, and are no `DataError`. So a program can
    tell a bad batch from a wrong use of healcore. The message says what to write instead.
    """


class UnusableLoader(DataError, TypeError):
    """The object is not a loader, or has fewer epochs than requested."""


@dataclass(eq=False, repr=False)
class EmptyLoader(DataError):
    """The loader gave no batch in a whole epoch.

    Without this error, a loop over a generator would seem to train for all epochs but the first
    one, without a single step.
    """

    epoch: int
    """The epoch without a batch, from 0."""
    loader: str
    """Name of the loader, for the message."""

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
    """Identifies a batch of the whole run by the numbers of its epoch and of its place there.

    Both numbers begin at 0. A rewind does not change the id of a batch: the third batch of the
    second epoch is `BatchId(1, 2)`, however often it is read. So a run can name the batches to
    skip, and a restart finds them again.
    """

    rows: list[int] | None = None
    """The first rows of the dataset in a batch that was read, at most
    `healcore.events.schema.MAX_ROWS`, or None if unknown. They are no part of the id."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """How pydantic reads an id in a checkpoint: as its two numbers.

        Pydantic before 2.8 takes `rows` for a third field.
        """
        from pydantic_core.core_schema import no_info_after_validator_function

        del source
        return no_info_after_validator_function(lambda place: cls(*place), handler(_Place))

    def __str__(self) -> str:
        rows = ""
        if self.rows is not None:
            rows = f" (rows {rows_text(self.rows)})"
        return f"batch {self.index} of epoch {self.epoch}{rows}"


class Position(NamedTuple):
    """A decoded position."""

    kind: str
    """`LoaderAdapter.kind` of the adapter that took the state."""
    batch: BatchId
    """The next batch."""
    state: LoaderState
    """The adapter's state, or None if the epoch has not begun or the adapter has no state."""
    sampler_epoch: int | None
    """Argument of `set_epoch` for this epoch, or None if unknown."""
    behind: int
    """Number of batches between the state and the next batch, to pass again."""


def encode_position(
    kind: str,
    batch: BatchId,
    state: LoaderState,
    sampler_epoch: int | None,
    division: Division | None,
) -> SavedPosition:
    """Encodes a position for a checkpoint. The distance `behind` is 0.

    The state becomes text. The text is also a copy: loaders return live objects, which the next
    batch would change.

    Args:
        kind: `LoaderAdapter.kind` of the adapter that took the state.
        batch: the next batch.
        state: the adapter's state, or None.
        sampler_epoch: argument of `set_epoch` for this epoch, or None if unknown.
        division: result of `division` for the loader.

    Returns:
        Dictionaries, lists, numbers, strings and None.

    Raises:
        UnsavableState: the state holds an object without a plain form.
    """
    text = None
    if state is not None:
        text = values.dumps(state, _STATE_PATH)
    return {
        "version": POSITION_VERSION,
        "kind": kind,
        "epoch": batch.epoch,
        "index": batch.index,
        "state": text,
        "told_epoch": sampler_epoch,
        "behind": 0,
        "division": division,
    }


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


def decode_position(value: Any) -> Position:
    """Decodes a position of a checkpoint or of a user, and checks every part of it.

    Args:
        value: result of `encode_position` or of `position_of_other_ranks`, or anything else.

    Raises:
        DataError: the value is not a position of this version, or is damaged.
    """
    if not isinstance(value, Mapping) or value.get("version") != POSITION_VERSION:
        raise DataError(
            f"a position is a result of Cursor.position() of version {POSITION_VERSION}, "
            f"not {value!r:.80}"
        )
    try:
        return _decoded(value)
    except DataError:
        raise
    except Exception as error:  # the value may be crafted or damaged
        raise DataError(f"the position cannot be read: {type(error).__name__}: {error}") from error


def _decoded(value: Mapping[str, Any]) -> Position:
    """The position in a mapping. Raises any exception for a mapping of another form."""
    behind = int(value["behind"])
    batch = BatchId(value["epoch"], value["index"])
    if not all(type(part) is int and part >= 0 for part in batch):
        raise DataError(f"epoch and index of a batch are whole numbers >= 0, not {(*batch,)}")
    if not 0 <= behind <= batch.index:
        raise DataError(f"batch {batch.index} has no {behind} batches before it in its epoch")
    number = value["told_epoch"]
    if number is not None:
        number = int(number)
    state = value["state"]
    if state is not None:
        state = values.loads(state, _STATE_PATH)
    return Position(str(value["kind"]), batch, state, number, behind)
