"""Imports healcore.torch where torch seems not to be installed, and prints the error."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

_find_spec = importlib.util.find_spec


def _find_all_but_torch(name: str, package: str | None = None) -> Any:
    return None if name == "torch" else _find_spec(name, package)


if __name__ == "__main__":
    importlib.util.find_spec = _find_all_but_torch
    try:
        importlib.import_module("healcore.torch")
    except ImportError as error:
        print(error)
