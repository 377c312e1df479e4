"""Compares the structure of a saved value with the structure of the live value of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.runtime.store import values


def is_stateful(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is the state of an object with `state_dict`.

    Such an object receives its state by `load_state_dict`, which checks and moves the arrays. Any
    other value is built as a new object from its entry.
    """
    return entry.get("stateful", "tree" in entry)


def mismatches(name: str, saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Compares a saved and a live entry of the same name.

    Args:
        name: name of the value in the state.
        saved: the saved entry, see `flat_state.Entries`.
        live: the live entry.

    Returns:
        How they differ, as texts. Empty if the saved value can be restored into the live value.
    """
    if is_stateful(live):
        if "identity" in live and "identity" in saved:
            return _differences(saved["identity"], live["identity"])
        return []
    if "leaves" in live:
        if "leaves" not in saved:
            return [f'"{name}" was an object with state_dict']
        return _differences(_array_types(name, saved), _array_types(name, live))
    # A program's dictionaries and lists may grow and shrink: only common arrays are compared.
    before, now = _array_types(name, saved), _array_types(name, live)
    common = before.keys() & now
    common_before = {key: before[key] for key in common}
    common_now = {key: now[key] for key in common}
    return _differences(common_before, common_now)


def _array_types(name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    """Place -> dtype and shape, which must be equal in a saved and a live entry.

    JAX and NumPy arrays may replace each other; random keys may not.
    """
    if "leaves" in entry:
        return {f"{name}{path}": _array_type(node) for path, node in entry["leaves"]}
    return {node["name"]: _array_type({"array": node}) for node in values.arrays_of(entry)}


def _array_type(node: values.Node) -> str:
    """Dtype and shape of a node, and the kind of a random key; "no array" for another value.

    A number is of one type, whether it is a Python number or an array without axes: a counter is a
    number at the start of a run, and an array after the first jitted step.
    """
    array = None
    if isinstance(node, dict):
        array = node.get("array")
    is_python_number = isinstance(node, int | float)
    if array is None:
        if is_python_number or (isinstance(node, dict) and node.keys() <= {"float", "complex"}):
            return "a number"
        return "no array"
    if array["kind"] == "key":
        return f"{array['dtype']}{tuple(array['shape'])} {array['impl']} key"
    if not array["shape"]:
        return "a number"
    return f"{array['dtype']}{tuple(array['shape'])}"


def _differences(saved: Mapping[str, str], live: Mapping[str, str]) -> list[str]:
    """What a saved and a live mapping do not have in common, as sorted texts."""
    wrong: list[str] = []
    for key, now in live.items():
        if key not in saved:
            wrong.append(f"{key} is missing in the saved state")
        elif saved[key] != now:
            wrong.append(f"{key} is {saved[key]} in the saved and {now} in the live state")
    wrong += [f"{key} is missing in the live state" for key in saved if key not in live]
    return sorted(wrong)
