"""One process restores what two ranks have saved. Argument: directory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from healcore.torch.store import DCPStore

store = DCPStore(Path(sys.argv[1]) / "disk")
like = {"model": {name: torch.zeros(6, 4) for name in ("sharded", "replicated", "plain")}}
found = store.restore(3, like).state["model"]
for name, tensor in found.items():
    assert torch.equal(tensor, torch.arange(24.0).reshape(6, 4) * 3), name
print("fine")
