"""The saved form of an `EngineState`: nested dicts of Python numbers, bools and lists.

`json.dumps` accepts the saved form, which moves a state between frameworks, processes and machines.
A float32 is saved exactly, because its repr as a double is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.core.errors import HealcoreError, exported_by

SCHEMA = 11  # version of the saved form


@exported_by("healcore.errors")
class StateError(HealcoreError, ValueError):
    """A saved state that does not fit the policy; the message says where, and what to do.

    For example, the window of a detector has another length than in the saved state. A state with
    wrong shapes would fail much later, inside a compiled step.
    """


def to_json_data(tree: Any) -> Any:
    """Converts a state to data that `json.dumps` accepts.

    Args:
        tree: a tree of NamedTuples, tuples, arrays and None.

    Returns:
        Dicts for NamedTuples, lists for tuples, and numbers or nested lists for arrays. A float32
        becomes the double with the same value.
    """
    if tree is None:
        return None
    if hasattr(tree, "_fields"):
        return {name: to_json_data(part) for name, part in tree._asdict().items()}
    if isinstance(tree, tuple):
        return [to_json_data(part) for part in tree]
    return np.asarray(tree).tolist()


def from_json_data(template: Any, data: Any, place: str) -> Any:
    """Restores a state from the result of `to_json_data`.

    Args:
        template: a state of the policy, whose structure, dtypes and shapes the result has.
        data: the saved data, which may be damaged or of another policy.
        place: where the data are, for messages, such as "state.detectors".

    Returns:
        The state as NumPy arrays.

    Raises:
        StateError: the data do not fit the template, or hold NaN or Inf.
    """
    if isinstance(template, np.ndarray):
        return _array(template, data, place)
    if template is None:
        if data is None:
            return None
    elif hasattr(template, "_fields") and isinstance(data, Mapping):
        if set(data) == set(template._fields):
            parts = [
                from_json_data(part, data[name], f"{place}.{name}")
                for name, part in template._asdict().items()
            ]
            return type(template)(*parts)
    elif type(template) is tuple and isinstance(data, list | tuple) and len(data) == len(template):
        pairs = zip(template, data, strict=True)
        return tuple(from_json_data(part, each, place) for part, each in pairs)
    raise StateError(
        f"{place} must have the structure of {to_json_data(template)!r:.120}, got {data!r:.80}: "
        "the saved state belongs to another policy, or is damaged"
    )


def _array(template: np.ndarray, data: Any, place: str) -> np.ndarray:
    """Restores one array, checked for kind, shape and finiteness."""
    try:
        array = np.asarray(data)
        with np.errstate(all="ignore"):
            cast = array.astype(template.dtype)
    except (TypeError, ValueError, OverflowError) as error:
        raise StateError(f"{place} must be {template.dtype}, got {data!r:.80}") from error
    if cast.shape != template.shape:
        raise StateError(
            f"{place} must have shape {template.shape}, got {cast.shape}: the policy's windows or "
            "the number of tensors differ from the saved state"
        )
    kinds = {"b": "b", "i": "i", "f": "fi"}[template.dtype.kind]
    fits = array.dtype.kind in kinds and (template.dtype.kind != "i" or (cast == array).all())
    if array.size and not (fits and np.isfinite(cast).all()):
        raise StateError(f"{place} must be finite and {template.dtype}, got {data!r:.80}")
    return cast
