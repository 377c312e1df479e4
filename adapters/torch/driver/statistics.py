"""Whose step a layer's batch statistics belong to, and when they are kept and put back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from healcore.torch import gradients
from healcore.torch.driver.batch_statistics import NAMES, BatchStatistics
from healcore.torch.healing import Healing


class Statistics:
    """Those of a whole state; nothing is done for one without such layers, nor in observe mode.

    With several optimizers each answers for the layers that it trains: its skip takes them back to
    where its own last step has left them, whoever has run them since.

    Args:
        state: the live state.
        healings: the handle of each of its optimizers, by name.
    """

    def __init__(self, state: Mapping[str, Any], healings: Mapping[str, Healing]) -> None:
        self._state = state
        self._healings = {n: h for n, h in healings.items() if h.engine.mode != "observe"}
        self._kept: dict[str, BatchStatistics] = {}
        self._nobodys: BatchStatistics | None = None
        self.look_again()

    def look_again(self) -> None:
        """Finds layers that have come into the model since. Walks over all modules."""
        found = layers_of(self._state, self._healings) if self._healings else {}
        nobodys = found.pop(None, None)
        if nobodys:
            self._nobodys = _covering(self._nobodys, nobodys)
        self._kept = {
            str(name): _covering(self._kept.get(str(name)), layers)
            for name, layers in found.items()
        }
        for i, (name, healing) in enumerate(self._healings.items()):
            first = i == 0 and self._nobodys is not None
            wanted = first or name in self._kept
            healing.hooks.on_ended = partial(self._end, name, first) if wanted else None

    def keep(self) -> None:
        """Takes what is there now for right, whatever it is."""
        for each in self._all():
            each.keep()

    def take(self) -> None:
        """Takes what is there now for right, as after a step."""
        for each in self._all():
            each.end(False)

    def close(self) -> None:
        """Takes the callbacks off."""
        for healing in self._healings.values():
            healing.hooks.on_ended = None

    def _end(self, name: str, first: bool, skipped: bool | Tensor) -> None:
        if name in self._kept:
            self._kept[name].end(skipped)
        if first and self._nobodys is not None:
            # Others may write these between two steps, as averages of the model's own.
            self._nobodys.end(False)

    def _all(self) -> list[BatchStatistics]:
        return [*self._kept.values(), *filter(None, [self._nobodys])]


def layers_of(
    state: Mapping[str, Any], healings: Mapping[str, Healing]
) -> dict[str | None, list[nn.Module]]:
    """Layers with batch statistics, by the name of the optimizer that trains them.

    A layer without trained parameters of its own goes with the nearest module around it that has
    some. Under None: those where nothing is trained, such as a copy that averages the weights.
    """
    owners = {
        id(p): name for name, heal in healings.items() for p in gradients.parameters(heal.optimizer)
    }
    found: dict[str | None, list[nn.Module]] = {}
    seen: set[int] = set()
    for root in state.values():
        if not isinstance(root, nn.Module):
            continue
        for path, layer in root.named_modules():
            if id(layer) in seen or not any(layer._buffers.get(name) is not None for name in NAMES):
                continue
            seen.add(id(layer))
            owner = next(filter(None, _trainers(root, path, owners)), None)
            found.setdefault(owner, []).append(layer)
    return found


def _trainers(root: nn.Module, path: str, owners: Mapping[int, str]) -> Iterator[str | None]:
    """Who trains the module of that path, then who trains the one around it, and so on."""
    while True:
        params = root.get_submodule(path).parameters()
        yield next((owners[id(p)] for p in params if id(p) in owners), None)
        if not path:
            return
        path = path.rpartition(".")[0]


def _covering(kept: BatchStatistics | None, layers: list[nn.Module]) -> BatchStatistics:
    if kept is None:
        return BatchStatistics(layers)
    kept.cover(layers)
    return kept
