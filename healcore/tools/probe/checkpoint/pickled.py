"""Which parts of a checkpoint are pickled: reading those would run whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from healcore.runtime.rollback.host_state import ITEM, pickled_parts
from healcore.runtime.store import files, structure
from healcore.tools.probe.verdict import ProbeError


def pickled_in(folder: Path) -> tuple[str, ...]:
    """Names of the pickled parts of one checkpoint of a store; nothing of them is read.

    DCP's own index is not among them: a pickle too, but one that healcore reads without running it.

    Raises:
        ProbeError: what says so cannot be read.
    """
    found: list[str] = []
    for file in sorted(folder.glob("state*.json")):
        try:
            for name, entry in json.loads(files.read(file)).items():
                found += _of_entry(name, entry)
        except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ProbeError(f"{file} is damaged: {error}") from None
    return tuple(found)


def _of_entry(name: str, entry: dict[str, Any]) -> list[str]:
    own = [*pickled_parts(entry)] if name == ITEM else []
    nodes = [entry["tree"]] if "tree" in entry else [node for _, node in entry.get("leaves", ())]
    return own + [at for node in nodes for at in structure.pickles_in(node, (name,))]
