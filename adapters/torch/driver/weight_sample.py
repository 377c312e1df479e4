"""`WeightSample`: notices that a program has put other weights into its model for a while.

Programs do so for an evaluation: they copy averaged weights into the model, load the best weights,
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
from healcore.torch.live_state import State

SAMPLE_BYTES = 64
"""Bytes of each parameter in the sample, from its middle."""
MAX_MODULES = 4
"""Max modules of the state with a sample."""
PREFERRED_SIZE = 1 << 20
"""Size in bytes up to which a parameter is preferred. The sample of a parameter on an accelerator
keeps the parameter's memory, also while the program has moved the model to the host."""


class _Place(NamedTuple):
    """The place of a parameter in a module."""

    name: str
    """The parameter's name for messages."""
    parameters: Mapping[str, Any]
    """The parameters of the module itself, `module._parameters`."""
    key: str
    """The parameter's key in `parameters`."""

    def parameter(self) -> Any:
        """The parameter that is there now, or None."""
        return self.parameters.get(self.key)


class _Sampled(NamedTuple):
    """A parameter of the sample."""

    place: _Place
    parameter: Tensor
    address: int
    """The parameter's `data_ptr()` at the last look."""


class _Candidate(NamedTuple):
    """A parameter that may be part of the sample."""

    path: str
    """Path of the parameter in its root module, such as "layers.0.weight"."""
    place: _Place
    parameter: Tensor


class WeightSample:
    """Keeps a few bytes of the weights, to notice that the program has replaced the weights.

    The sample has three trained parameters of each module, and two frozen parameters next to
    trained parameters, into which adapters are merged. Reading the sample takes the same time for
    every size of a model: a microsecond on a CPU, and one small kernel without a sync on an
    accelerator.

    Tensors of a kind whose bytes cannot be read (sharded, quantized, sparse) have no sample.

        step ─► keep     these are the weights of the training
        program copies averaged weights into the model, and ends
        end  ─► changed  names of the parameters with other bytes

    Args:
        state: the state of the run.
        healings: the handle of each optimizer, by name.
    """

    def __init__(self, state: State, healings: Mapping[str, Healing]) -> None:
        self._state = state
        self._healings = healings
        self._sampled: list[_Sampled] = []
        self._on_host: list[ctypes.Array[ctypes.c_char]] = []
        """The sampled bytes in host memory. Valid while the parameters have these addresses."""
        self._views: dict[torch.device, list[Tensor]] = {}
        """The sampled bytes on each accelerator."""
        self._order: list[_Place] = []
        """The places in the order of the kept bytes: first the places in host memory."""
        self._kept: list[bytes] = []
        """The kept bytes of the parameters in host memory."""
        self._kept_on_device: list[Tensor] = []
        """The kept bytes on each accelerator, in one tensor."""
        self._choose()

    def keep(self) -> None:
        """Keeps the bytes: these are the weights of the training now. No sync.

        Called at each step. If the program has made new parameters, they are chosen again, and if
        it has moved parameters, their new addresses are found.
        """
        for place, p, address in self._sampled:
            if place.parameters.get(place.key) is not p:
                self._choose()  # the program has made new parameters
                break
            if p.data_ptr() != address:
                self._look()  # the program has moved parameters
                break
        self._kept = [sampled_bytes.raw for sampled_bytes in self._on_host]
        if self._views and not _is_capturing(self._views):
            self._kept_on_device = [torch.cat(views) for views in self._views.values()]

    def changed(self) -> list[str]:
        """Compares the weights with the bytes of the last `keep`. A sync.

        Called when an exception has left the loop: a program that has put averaged weights into the
        model for an evaluation must not have them saved as the weights of the run.

        Returns:
            Names of the sampled parameters with other bytes.
        """
        kept = [*self._kept]
        for views, kept_bytes in zip(self._views.values(), self._kept_on_device, strict=False):
            counts = [view.numel() for view in views]
            for part in kept_bytes.split(counts):
                kept.append(part.cpu().numpy().tobytes())
        names: list[str] = []
        for place, before in zip(self._order, kept, strict=False):
            if _content(place.parameter()) != before:
                names.append(place.name)
        return names

    def _choose(self) -> None:
        """Chooses the parameters of the sample."""
        self._sampled = []
        for place in _chosen(self._state, self._healings):
            p = place.parameter()
            if _view(p) is not None:
                self._sampled.append(_Sampled(place, p, p.data_ptr()))
        self._look()

    def _look(self) -> None:
        """Finds the bytes of the sample at the current addresses. Forgets what was kept."""
        self._on_host = []
        self._views = {}
        self._kept = []
        self._kept_on_device = []
        on_host: list[_Place] = []
        on_device: dict[torch.device, list[_Place]] = {}
        for i, (place, p, _) in enumerate(self._sampled):
            self._sampled[i] = _Sampled(place, p, p.data_ptr())
            view = _view(p)
            if view is None:
                continue
            if view.is_cpu:
                bytes_type = ctypes.c_char * view.numel()
                self._on_host.append(bytes_type.from_address(view.data_ptr()))
                on_host.append(place)
            else:
                self._views.setdefault(view.device, []).append(view)
                on_device.setdefault(view.device, []).append(place)
        self._order = on_host
        for places in on_device.values():
            self._order += places


def _is_capturing(views: Mapping[torch.device, Any]) -> bool:
    """Whether a CUDA graph is captured, which would write into the sample later."""
    has_cuda = any(device.type == "cuda" for device in views)
    return has_cuda and torch.cuda.is_current_stream_capturing()


def _view(p: Any) -> Tensor | None:
    """The sampled bytes of a parameter, or None for a tensor of another kind."""
    is_plain = type(p) in (Parameter, Tensor) and p.layout is torch.strided
    if not is_plain or p.is_meta or p.is_quantized or not p.numel():
        return None
    size = p.element_size()
    elements = min(p.numel(), SAMPLE_BYTES // size)
    first = p.storage_offset() + (p.numel() - elements) // 2
    if p.untyped_storage().nbytes() < (first + elements) * size:
        return None  # expanded, or its memory is freed
    return torch.as_strided(p.detach(), (elements,), (1,), first).view(torch.uint8)


def _content(p: Any) -> bytes | None:
    """The sampled bytes of a parameter on the host."""
    view = _view(p)
    if view is None:
        return None
    return view.cpu().numpy().tobytes()


def _chosen(state: State, healings: Mapping[str, Healing]) -> Iterator[_Place]:
    """Yields the places of the sample."""
    candidates: dict[str, list[_Candidate]] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            candidates[name] = [*_candidates_in(name, value)]
    trained = _trained_ids(candidates, healings)
    seen: set[int] = set()
    modules = 0
    for in_module in candidates.values():
        own: list[_Candidate] = []
        frozen: list[_Candidate] = []
        for candidate in in_module:
            if id(candidate.parameter) not in trained:
                frozen.append(candidate)
            elif id(candidate.parameter) not in seen:  # modules may share a parameter
                own.append(candidate)
        seen.update(id(candidate.parameter) for candidate in own)
        if not own or modules == MAX_MODULES:
            continue
        modules += 1
        # Adapters are merged into the frozen parameter of their own module, or of its child.
        near: set[str] = set()
        for candidate in own:
            near.update(_modules_of(candidate.path, 3))
        merged_into = [each for each in frozen if near & {*_modules_of(each.path, 2)}]
        for candidate in [*_spread(own, 3), *_spread(merged_into, 2)]:
            yield candidate.place


def _trained_ids(
    candidates: Mapping[str, Sequence[_Candidate]], healings: Mapping[str, Healing]
) -> set[int]:
    """The ids of the parameters that the optimizers train."""
    trained: set[int] = set()
    for healing in healings.values():
        trained.update(id(p) for p in gradients.parameters(healing.optimizer))
    in_modules: list[Tensor] = []
    for in_module in candidates.values():
        in_modules += [candidate.parameter for candidate in in_module]
    if any(id(p) in trained for p in in_modules):
        return trained
    # The optimizers train copies of the modules' parameters (master weights).
    return {id(p) for p in in_modules if p.requires_grad}


def _candidates_in(name: str, root: nn.Module) -> Iterator[_Candidate]:
    """Yields each parameter of a module and of its submodules."""
    for module_path, module in root.named_modules():
        for key, p in module._parameters.items():
            if p is None:
                continue
            path = key
            if module_path:
                path = f"{module_path}.{key}"
            yield _Candidate(path, _Place(f"{name}.{path}", module._parameters, key), p)


def _modules_of(path: str, count: int) -> list[str]:
    """The modules around a parameter, innermost first, without the outermost."""
    paths: list[str] = []
    for _ in range(count):
        path = path.rpartition(".")[0]
        if path:
            paths.append(path)
    return paths


def _spread(candidates: Sequence[_Candidate], count: int) -> list[_Candidate]:
    """Chooses at most `count` candidates between the first and the last, small ones if possible."""
    small = [each for each in candidates if each.parameter.nbytes <= PREFERRED_SIZE]
    if len(small) >= count:
        candidates = small
    if not candidates:
        return []
    last = len(candidates) - 1
    positions = {round(n * last / (count - 1)) for n in range(count)}
    return [candidates[i] for i in sorted(positions)]
