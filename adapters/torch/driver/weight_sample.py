"""`WeightSample`: notices that a program has put other weights into its model for a while.

Programs do so for an evaluation: they copy averaged weights into the model, load the best ones,
call `.half()`, or merge adapters. If such a program ends there, these weights are not a state of
the training, and the next start would train on from them.

Neither `Tensor._version` nor the address shows it, because EMA classes write `p.data.copy_(...)`,
which changes neither. So the sample has content: a few bytes of a few parameters. An average
replaces all trained parameters, so a few of them are enough.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter

from healcore.torch import gradients
from healcore.torch.attachment import Healing

BYTES = 64
"""Bytes of each parameter in the sample, from its middle."""
MAX_MODULES = 4
"""Max modules of the state with a sample."""
SMALL = 1 << 20
"""Size in bytes up to which a parameter is preferred. The sample of a parameter on an accelerator
keeps the parameter's memory, also while the program has moved the model to the host."""


class _Place(NamedTuple):
    """The place of a parameter in a module."""

    name: str  # for messages
    parameters: Mapping[str, Any]  # of the module
    key: str

    def parameter(self) -> Any:
        """The parameter that is there now, or None."""
        return self.parameters.get(self.key)


class WeightSample:
    """A few bytes of the weights of a state.

    The sample has three trained parameters of each module, and two frozen parameters next to
    trained ones, which adapters are merged into. To read it takes as long for a large model as for
    a small one: a microsecond on a CPU, and one small kernel without a sync on an accelerator.

    Tensors of a kind whose bytes cannot be read (sharded, quantized, sparse) have no sample.

    Args:
        state: the state of the run.
        healings: the handle of each optimizer, by name.
    """

    def __init__(self, state: Mapping[str, Any], healings: Mapping[str, Healing]) -> None:
        self._state, self._healings = state, healings
        self._places: list[tuple[_Place, Tensor, int]] = []
        """Each place, with its parameter and the parameter's address at the last look."""
        self._on_host: list[ctypes.Array[ctypes.c_char]] = []
        """The sampled bytes in host memory. Valid while the parameters have these addresses."""
        self._views: dict[torch.device, list[Tensor]] = {}
        """The sampled bytes on each accelerator."""
        self._order: list[_Place] = []
        """The places in the order of the kept bytes: first the places in host memory."""
        self._kept: list[bytes] = []
        self._kept_there: list[Tensor] = []
        self._choose()

    def keep(self) -> None:
        """Keeps the bytes: these are the weights of the training now. No sync."""
        for place, p, address in self._places:
            if place.parameters.get(place.key) is not p:
                self._choose()  # the program has made new parameters
                break
            if p.data_ptr() != address:
                self._look()
                break
        self._kept = [sampled.raw for sampled in self._on_host]
        if self._views and not _is_capturing(self._views):
            self._kept_there = [torch.cat(views) for views in self._views.values()]

    def changed(self) -> list[str]:
        """Names of the sampled parameters with other bytes than at the last `keep`. A sync."""
        kept = [*self._kept]
        for views, together in zip(self._views.values(), self._kept_there, strict=False):
            counts = [view.numel() for view in views]
            kept += [part.cpu().numpy().tobytes() for part in together.split(counts)]
        return [
            place.name
            for place, before in zip(self._order, kept, strict=False)
            if _content(place.parameter()) != before
        ]

    def _choose(self) -> None:
        """Chooses the parameters of the sample."""
        chosen = [(place, place.parameter()) for place in _chosen(self._state, self._healings)]
        self._places = [(place, p, 0) for place, p in chosen if _view(p) is not None]
        self._look()

    def _look(self) -> None:
        """Finds the bytes of the sample at the current addresses. Forgets what was kept."""
        self._places = [(place, p, p.data_ptr()) for place, p, _ in self._places]
        self._on_host, self._views, self._kept, self._kept_there = [], {}, [], []
        on_host: list[_Place] = []
        on_device: dict[torch.device, list[_Place]] = {}
        for place, p, _ in self._places:
            view = _view(p)
            if view is None:
                continue
            if view.is_cpu:
                sampled = ctypes.c_char * view.numel()
                self._on_host.append(sampled.from_address(view.data_ptr()))
                on_host.append(place)
            else:
                self._views.setdefault(view.device, []).append(view)
                on_device.setdefault(view.device, []).append(place)
        self._order = [*on_host, *(place for places in on_device.values() for place in places)]


def _is_capturing(views: Mapping[torch.device, Any]) -> bool:
    """Whether a CUDA graph is captured, which would write into the sample later."""
    of_cuda = any(device.type == "cuda" for device in views)
    return of_cuda and torch.cuda.is_current_stream_capturing()


def _view(p: Any) -> Tensor | None:
    """The sampled bytes of a parameter, or None for a tensor of another kind."""
    plain = type(p) in (Parameter, Tensor) and p.layout is torch.strided
    if not plain or p.is_meta or p.is_quantized or not p.numel():
        return None
    size = p.element_size()
    elements = min(p.numel(), BYTES // size)
    first = p.storage_offset() + (p.numel() - elements) // 2
    if p.untyped_storage().nbytes() < (first + elements) * size:
        return None  # expanded, or its memory is freed
    return torch.as_strided(p.detach(), (elements,), (1,), first).view(torch.uint8)


def _content(p: Any) -> bytes | None:
    """The sampled bytes of a parameter on the host."""
    view = _view(p)
    return None if view is None else view.cpu().numpy().tobytes()


def _chosen(state: Mapping[str, Any], healings: Mapping[str, Healing]) -> Iterator[_Place]:
    """The places of the sample."""
    trained = {id(p) for h in healings.values() for p in gradients.parameters(h.optimizer)}
    roots = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    places = {name: [*_places_in(name, root)] for name, root in roots.items()}
    if not any(id(p) in trained for found in places.values() for _, _, p in found):
        # The optimizers train copies of the modules' parameters (master weights).
        trained = {id(p) for found in places.values() for *_, p in found if p.requires_grad}
    seen: set[int] = set()
    modules = 0
    for found in places.values():
        own = [each for each in found if id(each[2]) in trained and id(each[2]) not in seen]
        seen.update(id(p) for *_, p in own)
        if not own or modules == MAX_MODULES:
            continue
        modules += 1
        # Adapters are merged into the frozen parameter of their own module, or of its child.
        near = {above for path, *_ in own for above in _modules_of(path, 3)}
        frozen = [each for each in found if id(each[2]) not in trained]
        beside = [each for each in frozen if near & {*_modules_of(each[0], 2)}]
        yield from (place for _, place, _ in [*_spread(own, 3), *_spread(beside, 2)])


def _places_in(name: str, root: nn.Module) -> Iterator[tuple[str, _Place, Tensor]]:
    """Path, place and value of each parameter of a module."""
    for path, module in root.named_modules():
        for key, p in module._parameters.items():
            if p is not None:
                parts = ".".join(filter(None, (path, key)))
                yield parts, _Place(f"{name}.{parts}", module._parameters, key), p


def _modules_of(path: str, count: int) -> list[str]:
    """The modules around a parameter, innermost first, without the outermost."""
    found = []
    for _ in range(count):
        path = path.rpartition(".")[0]
        if path:
            found.append(path)
    return found


def _spread(
    found: Sequence[tuple[str, _Place, Tensor]], count: int
) -> list[tuple[str, _Place, Tensor]]:
    """At most so many of the places, from the first to the last; small parameters if possible."""
    small = [each for each in found if each[2].nbytes <= SMALL]
    places = small if len(small) >= count else found
    if not places:
        return []
    last = len(places) - 1
    return [places[i] for i in sorted({round(n * last / (count - 1)) for n in range(count)})]
