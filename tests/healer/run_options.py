"""Options of a run by name, for tests that pass them through: `save_every=5`, `events=path`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from healcore import Checkpoints, Hooks, Logging

_HOOKS = ("on_incident", "on_saved", "on_rollback")


def grouped(options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The keywords of `Healer`, with options of a group in their group; `save_every` is `every`."""
    given = {**more, **options}
    if "save_every" in given:
        given["every"] = given.pop("save_every")
    found: dict[str, Any] = {}
    groups: dict[str, tuple[Any, Any]] = {
        "checkpoints": (Checkpoints, [each.name for each in fields(Checkpoints)]),
        "logging": (Logging, [each.name for each in fields(Logging)]),
        "hooks": (Hooks, _HOOKS),
    }
    for name, (group, options_of_group) in groups.items():
        mine = {each: given.pop(each) for each in options_of_group if each in given}
        if mine:
            found[name] = group(**mine)
    return {**given, **found}
