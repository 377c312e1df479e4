"""The saved form of an `EngineState`: nested dicts of Python numbers, bools and lists.

`json.dumps` accepts the saved form, which moves a state between frameworks, processes and machines.
A float32 is saved exactly, because its repr as a double is exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from healcore.core.engine.state import UNKNOWN_RATE, EngineState
from healcore.core.errors import HealcoreError, exported_by

SCHEMA = 10  # version of the saved form

_SAVED_AS = {
    "streak": "run",
    "rejections": "run",
    "elevated_steps": "run",
    "finite_skip_streak": "skips",
}
"""Field of a state -> its name in the saved form, if the name is another one."""


@exported_by("healcore.errors")
class StateError(HealcoreError, ValueError):
    """A saved state that does not fit the policy; the message says where, and what to do.

    For example, the window of a detector has another length than in the saved state. A state with
    wrong shapes would fail much later, inside a compiled step.
    """


def with_unknown_rate(state: EngineState, *, reads_rate: bool) -> EngineState:
    """Marks the learning rate of an older saved state as unknown where it was unknown.

    A state that was saved without the key `unknown_rate` has a rate of 1 if the program passed no
    rate, and a rate of 0 if the policy had not read it.

    Args:
        state: the state that was saved, in NumPy.
        reads_rate: whether the policy reads the rate.
    """
    rate, was_read = state.lr.rate, reads_rate and state.step > 0
    if rate == 1.0 or (rate == 0.0 and not was_read):
        rate = np.full_like(rate, UNKNOWN_RATE)
    return state._replace(lr=state.lr._replace(rate=rate))


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
        return {_saved_name(name): to_json_data(part) for name, part in tree._asdict().items()}
    if isinstance(tree, tuple):
        return [to_json_data(part) for part in tree]
    return np.asarray(tree).tolist()


def from_json_data(template: Any, data: Any, place: str) -> Any:
    """Restores a state from the result of `to_json_data`.

    Args:
        template: a state of the policy, whose structure, dtypes and shapes the result has.
        data: the saved data, which may be damaged or of another policy.
        place: where the data are, for messages, such as "state.detectors[0]".

    Returns:
        The state as NumPy arrays.

    Raises:
        StateError: the data do not fit the template, or hold NaN or Inf.
    """
    if isinstance(template, np.ndarray):
        return _array(template, data, place)
    if hasattr(template, "_fields") and isinstance(data, Mapping):
        names = [_saved_name(field) for field in template._fields]
        if set(data) == set(names):
            parts = []
            for name, part in zip(names, template, strict=True):
                parts.append(from_json_data(part, data[name], f"{place}.{name}"))
            return type(template)(*parts)
    if type(template) is tuple and isinstance(data, list | tuple) and len(data) == len(template):
        parts = []
        for i, (part, each) in enumerate(zip(template, data, strict=True)):
            parts.append(from_json_data(part, each, f"{place}[{i}]"))
        return tuple(parts)
    if template is None and data is None:
        return None
    expected = to_json_data(template)
    raise StateError(
        f"{place} must have the structure of {expected!r:.120}, got {data!r:.80}: the "
        "saved state belongs to another policy, or is damaged"
    )


def _saved_name(field: str) -> str:
    return _SAVED_AS.get(field, field)


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
