"""`WeightSample`: notices that a program has put other weights into its model for a while.

Programs do so for an evaluation: they copy averaged weights into the model, load the best weights,
call `.half()`, or merge adapters. If such a program ends there, these weights are not a state of
the training, and the next start would train on from them.

Neither `Tensor._version` nor the address shows it, because EMA classes write `p.data.copy_(...)`,
which changes neither. So the sample has content: a few bytes of a few parameters. An average
replaces all trained parameters, so a few of them are enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.live_state import State, modules

SAMPLE_BYTES = 64
"""Bytes of each parameter in the sample, from its middle."""


class WeightSample:
    """Keeps a few bytes of the weights, to notice that the program has replaced the weights.

        step ─► keep     these are the weights of the training
        program copies averaged weights into the model, and ends
        end  ─► changed  names of the parameters with other bytes

    Reading the sample takes the same time for every size of a model. It takes a few small kernels
    without a sync on an accelerator.

    Args:
        state: the state of the run.
        healings: the handle of each optimizer, by name.
    """

    def __init__(self, state: State, healings: Mapping[str, Healing]) -> None:
        self._places = _places(state, healings)
        self.keep()

    def keep(self) -> None:
        """Keeps the bytes: these are the weights of the training now. No sync."""
        self._kept: list[Tensor] = []
        for _, table, key in self._places:
            self._kept.append(sample(table.get(key)))

    def changed(self) -> list[str]:
        """Compares the weights with the bytes of the last `keep`. A sync.

        Returns:
            Names of the sampled parameters with other bytes.
        """
        names: list[str] = []
        for (name, table, key), kept in zip(self._places, self._kept, strict=True):
            if kept.tolist() != sample(table.get(key)).tolist():
                names.append(name)
        return names


_Place: TypeAlias = tuple[str, Mapping[str, Any], str]
"""Name of a parameter for messages, the parameters of its module, and its key in them."""


def _places(state: State, healings: Mapping[str, Healing]) -> list[_Place]:
    """The places of the sample: the first and the last trained parameter of the state.

    Also the two parameters before the first one: an adapter is merged into the frozen weight of its
    layer.
    """
    trained: set[int] = set()
    for healing in healings.values():
        trained.update(id(p) for p in gradients.parameters(healing.optimizer))
    places: list[_Place] = []
    for path, module in modules(state).items():
        places += [(f"{path}.{key}", module._parameters, key) for key in module._parameters]
    at = [i for i, (_, table, key) in enumerate(places) if id(table[key]) in trained]
    if not at:
        return []
    return [*places[max(0, at[0] - 2) : at[0] + 1], places[at[-1]]]


def sample(p: Any) -> Tensor:
    """A copy of some bytes of a parameter; of none if it is sharded, sparse, or without data.

    Args:
        p: a parameter, or another value.

    Returns:
        At most `SAMPLE_BYTES`, from the middle, on the parameter's device.
    """
    if type(p) in (Tensor, Parameter) and p.layout is torch.strided and not p.is_meta:
        count = min(p.numel(), SAMPLE_BYTES // p.element_size())
        first = p.storage_offset() + (p.numel() - count) // 2
        with suppress(RuntimeError):  # an expanded tensor, or freed memory
            return torch.as_strided(p.detach(), (count,), (1,), first).view(torch.uint8).clone()
    return torch.empty(0)
