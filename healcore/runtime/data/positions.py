"""Positions in the data: the ids of batches, and what a checkpoint holds of the loaders.

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
from healcore.events.sentences import rows_text
from healcore.runtime.data.loader_protocols import LoaderState
from healcore.runtime.store import values

POSITION_VERSION = 2
"""Version of the format of positions. A position of another version is not read."""
_STATE_PATH = ("the loader's state",)

SavedPosition = dict[str, Any]
"""A position as JSON-safe values, see `encode_position`."""
Positions = dict[str, Any]
"""The positions of all loaders of a run, as a checkpoint has them:

    {"0": position, "1": position, "count": 2, "epoch": 1, "begun": [1], "trained": 1}

The keys of the positions are the numbers of the loaders, see `LoaderNumbers`."""
EPOCH = "epoch"
"""Key next to the positions of loaders: the epoch of the program's loop."""
COUNT = "count"
"""Key next to the positions of loaders: the number of loaders so far."""
BEGUN = "begun"
"""Key next to the positions of loaders: the numbers of the loaders that the loop has begun in this
epoch, in order."""
LEFT = "left"
"""Key next to the positions of loaders: the numbers of the loaders whose epoch a `break` has left,
while the body of `Healer.epochs` runs on. A restart reads no further batch of this epoch."""
TRAINED = "trained"
"""Key next to the positions of loaders: the number of the loader of the last step."""
Division = list[Any]
"""What has to stay equal for another number of ranks, see `other_ranks.division`."""


class DataError(HealcoreError, RuntimeError):
    """A position in the data, or a request to the cursor, is not valid.

    Exceptions of the user's loader propagate unchanged, and are no `DataError`. So a program can
    distinguish a bad batch from a wrong use of healcore. The message says what to write instead.
    """

    __module__ = "healcore"


class UnusableLoader(DataError, TypeError):
    """The object is not a loader, or has fewer epochs than requested."""

    __module__ = "healcore.errors"


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
                "it can be iterated over only once. Pass a function that makes it again, as in "
                "healer.batches(lambda: stream(seed=healer.epoch)), or something that starts again "
                "with every iter()"
            )
        return f"{self.loader} gave no batch in epoch {self.epoch}: {hint}"


EmptyLoader.__module__ = "healcore.errors"


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
    `healcore.events.sentences.MAX_ROWS`, or None if unknown. They are no part of the id."""

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
    """Number of batches between the state and the next batch, which a rewind passes again."""


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


# -- all loaders of a run ------------------------------------------------------------------------


def place_of(position: Mapping[str, Any]) -> BatchId:
    """The next batch of a position.

    Args:
        position: a position that `check_positions` has accepted.

    Returns:
        Epoch and index of the batch, both from 0.
    """
    return BatchId(position["epoch"], position["index"])


def has_begun(position: Mapping[str, Any]) -> bool:
    """Whether a batch was read before a position."""
    return place_of(position) > BatchId(0, 0)


def check_positions(position: Mapping[str, Any]) -> None:
    """Checks the positions of a checkpoint before anything is restored from it.

    Raises:
        DataError: a part of them cannot be read.
    """
    for key, value in position.items():
        if key in (BEGUN, LEFT):
            if not isinstance(value, list):
                raise DataError(f"the numbers of loaders are a list, not {value!r:.80}")
            for number in value:
                _check_number("number of a loader", number)
        elif key in (COUNT, EPOCH, TRAINED):
            _check_number(f"{key} of loaders", value)
        else:
            decode_position(value)


def _check_number(name: str, value: object) -> None:
    """Raises DataError for a value that is no whole number >= 0."""
    if type(value) is not int or value < 0:
        raise DataError(f"the {name} is a whole number >= 0, not {value!r:.80}")
