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
    """Converts a state or a policy to data that `json.dumps` accepts.

    Args:
        tree: a tree of NamedTuples, tuples, arrays and None.

    Returns:
        Dicts for tuples, by the names or the numbers of their parts, and numbers or nested lists
        for arrays. A float32 becomes the double with the same value.
    """
    if tree is None:
        return None
    if isinstance(tree, tuple):
        return {name: to_json_data(part) for name, part in _parts(tree).items()}
    return np.asarray(tree).tolist()


def _parts(tree: Any) -> dict[str, Any]:
    """The parts of a tuple by name, or by number."""
    names = getattr(tree, "_fields", None) or map(str, range(len(tree)))
    return dict(zip(names, tree, strict=True))


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
    if template is None and data is None:
        return None
    if isinstance(template, tuple) and isinstance(data, Mapping):
        names = _parts(template)
        if set(data) == set(names):
            parts = [
                from_json_data(part, data[name], f"{place}.{name}") for name, part in names.items()
            ]
            return tuple.__new__(type(template), parts)
        missing, unknown = set(names) - set(data), set(data) - set(names)
        problem = f"must have other keys: missing {sorted(missing)}, unknown {sorted(unknown)}"
    else:
        problem = f"must have the form of {to_json_data(template)!r:.80}, got {data!r:.80}"
    raise StateError(
        f"{place} {problem}: the saved state is damaged, or belongs to another policy; load the "
        "state with its own policy, or start from a fresh state"
    )


def _array(template: np.ndarray, data: Any, place: str) -> np.ndarray:
    """Restores one array, checked for kind, shape and finiteness."""
    kind = template.dtype.kind
    try:
        array = np.asarray(data)
        with np.errstate(all="ignore"):
            cast = array.astype(template.dtype)
        fits = array.dtype.kind in {"b": "b", "i": "i", "f": "fi"}[kind] and np.isfinite(cast).all()
        fits = fits and (kind == "f" or (cast == array).all())
    except (TypeError, ValueError, OverflowError):
        cast, fits = np.zeros(()), False
    if cast.shape != template.shape or not (fits or cast.size == 0):
        raise StateError(
            f"{place} must be finite, {template.dtype} and of shape {template.shape}, got "
            f"{data!r:.80}: the state is damaged, or of a policy with other windows"
        )
    return cast
