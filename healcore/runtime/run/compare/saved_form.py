"""The form in which a checkpoint holds the batches and numbers of comparisons: plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from healcore.runtime.driver import NumberRange
from healcore.runtime.run.compare.trained_step import ObservedBatch, TrainedStep
from healcore.runtime.store import values
from healcore.runtime.store.packed_values import PackedValues

MAX_BATCH_BYTES = 16 << 20
"""Max bytes of the batches in a checkpoint. Others are not saved."""
_NUMBERS = ("the numbers of the optimizers",)
_BATCHES = ("the batches of comparisons",)


def pack_batches(steps: Iterable[TrainedStep]) -> PackedValues:
    """Packs the batches of steps, by the number of the step.

    Args:
        steps: the steps, the most important first. Steps without batches and repeated steps are not
            packed. Neither are batches of types that have no plain form, and batches for which no
            room is left: a checkpoint must not grow much beyond the state.
    """
    packed = PackedValues(MAX_BATCH_BYTES)
    for step in steps:
        if step.batches and step.index not in packed:
            parts = [(batch.content, batch.weight) for batch in step.batches]
            packed.add(step.index, parts, _BATCHES)
    return packed


def unpack_batches(packed: Mapping[int, Any]) -> dict[int, tuple[ObservedBatch, ...]]:
    """Restores the batches of a checkpoint: the inverse of `pack_batches`.

    Args:
        packed: number of a step -> its batches, as tuples of the fields of `ObservedBatch`.

    Returns:
        Number of a step -> its batches.
    """
    observed = {}
    for index, parts in packed.items():
        observed[index] = tuple(ObservedBatch(*part) for part in parts)
    return observed


def numbers_to_text(numbers: Mapping[str, NumberRange]) -> str:
    """The ranges of the optimizers' numbers as text, for the record of a checkpoint.

    NaN and Inf keep their value, which JSON has no number for.

    Args:
        numbers: name -> lowest, highest and last value.
    """
    return values.dumps({name: tuple(each) for name, each in numbers.items()}, _NUMBERS)


def numbers_from_text(text: str) -> dict[str, NumberRange]:
    """Reads the ranges of the optimizers' numbers: the inverse of `numbers_to_text`.

    Args:
        text: the text of a record.

    Returns:
        Name -> lowest, highest and last value.
    """
    found = values.loads(text, _NUMBERS)
    return {name: NumberRange(*each) for name, each in found.items()}
