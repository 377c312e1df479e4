"""Options of a run by name, for tests that pass them through: `save_every=5`, `events=path`."""

from collections.abc import Mapping
from inspect import signature
from typing import Any

from healcore import Checkpoints, Hooks, Logging

GROUPS = {"checkpoints": Checkpoints, "logging": Logging, "hooks": Hooks}


def grouped(options: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The keywords of `Healer`, with options of a group in their group; `save_every` is `every`."""
    given = {**more, **options}
    if "save_every" in given:
        given["every"] = given.pop("save_every")
    for name, group in GROUPS.items():
        mine = {each: given.pop(each) for each in signature(group).parameters if each in given}
        if mine:
            given[name] = group(**mine)
    return given
