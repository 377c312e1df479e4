"""Positions in the data: the ids of batches, and what a checkpoint holds of the loaders.

A position is the id of the next batch, and a state of the loader from before it. A rewind sets the
state, and then reads and drops the batches between the state and the next batch, if there are any.

A position consists of Python values that any checkpoint can hold. The states of the loader and of
its random generators are text of `runtime.store.values`, because a JAX run may read from a torch
loader, and a store of JAX cannot save torch tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, Field

from healcore.core.errors import HealcoreError
from healcore.events.kinds import rows_text
from healcore.runtime.data.loaders import is_type, samplers_of
from healcore.runtime.store import values

_Number = Annotated[int, Field(strict=True, ge=0)]
_Place = Annotated[list[_Number], Field(min_length=3, max_length=3)]
_STATE_PATH = ("the loader's state",)

SavedPosition = dict[str, Any]
"""A position as JSON-safe values, with the keys of `Position`."""
Place = list[int]
"""Where in the program a pass begins: [loop, epoch, index].

    loop    number of loops over numbered epochs that have ended before
    epoch   the epoch of such a loop plus 1, or 0 outside of one
    index   number of passes of the source that have begun before in this epoch, or since the loop

The order of lists is the order in which the passes begin."""
Positions = dict[str, Any]
"""The positions of all sources of a run, as a checkpoint has them:

    {"epoch": 1, "trained": "", "sources": {"": position, "b": position}}

"epoch" is the epoch of the program's loop, and "trained" the source of the last step or None. The
position of a source has these keys besides those of `Position`:

    place        where in the program its pass begins
    first        number of the first pass that the loop there has read
    since        number of the pass since which the program has read the source with one loader
    batch_size   rows in a batch, or None if it is unknown
    evaluations  places of passes that no step has used, which a restart reads again
    begun        whether another pass had begun, which no step had used
    left         whether a `break` has dropped the rest of the pass
"""
Division = list[Any]
"""What has to stay equal for another number of ranks, see `division`."""


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


class _Numbers(NamedTuple):
    epoch: int
    index: int
    """Number of the batch in its epoch; skipped batches count too."""


class BatchId(_Numbers):
    """Identifies a batch of the whole run by the numbers of its epoch and of its place there.

    Both numbers begin at 0. A rewind does not change the id of a batch: the third batch of the
    second epoch is `BatchId(1, 2)`, however often it is read. So a run can name the batches to
    skip, and a restart finds them again.
    """

    rows: list[int] | None = None
    """The first rows of the dataset in a batch that was read, at most
    `healcore.events.kinds.MAX_ROWS`, or None if unknown. They are no part of the id."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """How pydantic reads an id in a checkpoint: as its two numbers.

        Pydantic before 2.8 takes `rows` for a third field.
        """
        from pydantic_core.core_schema import no_info_after_validator_function

        del source
        return no_info_after_validator_function(lambda place: cls(*place), handler(_Numbers))

    def __str__(self) -> str:
        if self.rows is None:
            rows = ""
        else:
            rows = f" (rows {rows_text(self.rows)})"
        return f"batch {self.index} of epoch {self.epoch}{rows}"


def _decoded_state(text: str | None) -> Any:
    """The states of a saved position, or None."""
    if text is None:
        return None
    return values.loads(text, _STATE_PATH)


class Position(BaseModel, frozen=True):
    """A decoded position. The keys of a saved position have the names of the fields."""

    kind: str
    """`Reader.kind` of the reader that took the state."""
    epoch: _Number
    index: _Number
    state: Annotated[Any, BeforeValidator(_decoded_state)]
    """State of the reader, or None for no state."""
    told_epoch: int | None
    """Argument of `set_epoch` for this epoch, or None if unknown."""
    division: Division | None
    """Result of `division` for the loader."""
    ranks: int | None = None
    """Number of ranks that have saved the position, if it is another one than now."""

    @property
    def batch(self) -> BatchId:
        """The next batch."""
        return BatchId(self.epoch, self.index)


def state_text(state: Any) -> str | None:
    """`Position.state` as text: a copy, because loaders return live objects.

    Raises:
        UnsavableState: the state holds an object without a plain form.
    """
    if state is None:
        return None
    return values.dumps(state, _STATE_PATH)


def decode_position(value: Any) -> Position:
    """Decodes a position of a checkpoint or of a user, and checks every part of it.

    Raises:
        DataError: the value is not a position of this version, or is damaged.
    """
    try:
        return Position.model_validate(value)
    except Exception as error:  # the value may be crafted or damaged
        raise DataError(
            f"a position is a result of Cursor.position(), not {value!r:.80}: {error}"
        ) from error


# -- all sources of a run ------------------------------------------------------------------------


def place_of(position: Mapping[str, Any]) -> BatchId:
    """The next batch of a position.

    Args:
        position: a position that `check_positions` has accepted.

    Returns:
        Epoch and index of the batch, both from 0.
    """
    return BatchId(position["epoch"], position["index"])


class _SourcePosition(Position, frozen=True):
    """The keys of a source's position besides those of `Position`."""

    place: _Place
    first: _Number
    since: _Number
    batch_size: int | None
    evaluations: list[_Place]
    begun: bool
    left: bool


class _Positions(BaseModel, extra="forbid"):
    """The positions of a checkpoint."""

    epoch: _Number
    trained: str | None
    sources: dict[str, _SourcePosition]


def check_positions(position: Mapping[str, Any]) -> None:
    """Checks the positions of a checkpoint before anything is restored from it.

    Raises:
        DataError: a part of them cannot be read.
    """
    try:
        _Positions.model_validate(position)
    except Exception as error:  # the value may be crafted or damaged
        raise DataError(f"the positions of the loaders cannot be read: {error}") from None


# -- another number of ranks ---------------------------------------------------------------------


def division(loader: Any) -> Division | None:
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
            return ["rows of a global batch", rows * replicas]
        if is_type(sampler, "torch.utils.data", "SequentialSampler") and hasattr(loader, "__len__"):
            return ["batches", len(loader)]
    return None


def positions_of_other_ranks(
    sources: Mapping[str, SavedPosition], ranks: int
) -> dict[str, SavedPosition]:
    """Converts the positions of sources for a run with another number of ranks.

    The loader's state belongs to one rank's part of the data and is not used. The epoch begins
    again, and the batches before the position are read and dropped:

        saved by 4 ranks, 8 rows each:  batch 7 = rows 224 to 255 of the epoch's order
        2 ranks, 16 rows each:          batch 7 = rows 224 to 255: the run continues there
        2 ranks, 8 rows each:           batch 7 = rows 112 to 127: DataError

    Args:
        sources: name of a source -> its position on rank 0.
        ranks: number of ranks of the run that has saved the positions.

    Returns:
        Positions with the key `ranks`, which `check_division` reads.
    """
    return {name: {**each, "state": None, "ranks": ranks} for name, each in sources.items()}


def check_division(position: Position, division: Division | None, loader: str) -> None:
    """Checks that a position of another number of ranks selects the same data.

    Without this check, a run that continues on fewer ranks would repeat some rows of the epoch and
    never read others, without a sign of it.

    Args:
        position: a position.
        division: result of `division` for the live loader.
        loader: name of the live loader, for the message.

    Raises:
        DataError: the batch of the position has other rows now.
    """
    ranks, before = position.ranks, position.division
    if ranks is None or (before is not None and before == division):
        return
    had, has = (
        "an unknown number of batches" if each is None else f"{each[1]} {each[0]}"
        for each in (before, division)
    )
    raise DataError(
        f"the position in the data was saved by {ranks} ranks, and with this number of ranks batch "
        f"{position.index} has other rows: the loader had {had}, and {loader} has {has}. Start the "
        f"run with {ranks} ranks, keep (batch size) x (number of ranks), or pass a list of global "
        "batches and let every rank take its rows"
    )
