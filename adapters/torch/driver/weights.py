"""`TorchWeights`: copies, replaces and evaluates the weights of a state. The run is unchanged."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from healcore.core.signals import SignalError
from healcore.runtime.data.random_states import isolated
from healcore.runtime.driver import DIGESTED, WeightsChanged
from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.driver.accumulation import Accumulation

Key = int | tuple[int, str]
"""The id of a parameter, or the id of a module and the name of its buffer.

A forward pass may replace a buffer by a new tensor, so the id of a buffer does not last.
"""
STATISTICS = ("running_mean", "running_var")
"""Names of the floating buffers that a copy holds: the statistics of batch normalization."""


class TorchWeights:
    """The weights of a state: the tensors that one comparison replaces together.

    These are the parameters that the optimizers train, and the statistics of batch normalization,
    which a layer in evaluation mode reads: damage in them would be on both sides.

    Everything else stays as it is now, because it belongs to the program and not to the weights: a
    mask of pruning, a flag of quantization, a temperature, and the queue of a momentum encoder.
    Averages and target networks stay too: where the objective grows, as in TD learning, old weights
    with their old target have the lower loss in a healthy run (docs/decisions, 37).

    Of a DTensor, the weights are the local shard. Buffers and flags of a wrapper outside of the
    state are not restored.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        healings: Mapping[str, Healing],
        accumulations: Iterable[Accumulation],
    ) -> None:
        self._state = state
        self._healings = healings
        self._accumulations = accumulations
        self._differentiates = False
        """Whether `loss_fn` computes gradients, as for adversarial examples."""
        self.autocast: tuple[str, torch.dtype] | None = None
        """Device type and dtype of the `torch.autocast` in which the loop computes its loss."""
        self._newest: dict[Key, Tensor] = {}
        """The tensors of the newest copy that no optimizer trains."""

    def copy(self) -> dict[Key, Tensor]:
        """Key -> copy on the host: an accelerator's memory holds one set of weights.

        Copies share the tensors that do not change: a frozen teacher takes the memory of one copy.
        """
        followers = _on_host(self._followers())
        for key, found in followers.items():
            known = self._newest.get(key)
            if known is not None and known.dtype == found.dtype and torch.equal(known, found):
                followers[key] = known
        self._newest = followers
        return {**_on_host(self._trained()), **followers}

    def digest(self) -> str:
        """See `Driver.settings`. Parameters without data (lazy, meta) do not count."""
        found = hashlib.blake2b(digest_size=8)
        for part in self._trained().values():
            if not (is_lazy(part) or part.is_meta):
                flat = part.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // DIGESTED)][:DIGESTED].to("cpu", copy=True)
                found.update(bytes(sample.view(torch.uint8).numpy()))
        return found.hexdigest()

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[Key, Tensor] | None = None,
        *,
        redraw: bool = False,
    ) -> list[Any]:
        """See `Driver.losses_of`."""
        if weights is not None:
            shapes = [{k: w.shape for k, w in each.items()} for each in (weights, self._all())]
            if shapes[0] != shapes[1]:
                raise WeightsChanged
        try:
            mixed = torch.autocast(*self.autocast) if self.autocast else nullcontext()
            with isolated(), self._restoring(), torch.set_grad_enabled(self._differentiates), mixed:
                # `_restoring` restores all others.
                current = {} if weights is None else _on_host(self._trained())
                try:
                    self._write(weights or {})
                    if redraw:
                        for device in {part.device for part in self._trained().values()}:
                            torch.rand((), device=device)
                        random.random()
                        np.random.rand()  # noqa: NPY002 -- users do
                    return [_loss_of_copy(loss_fn, batch) for batch in batches]
                finally:
                    self._write(current)
        except RuntimeError as error:
            if self._differentiates or "not require grad" not in str(error):
                raise
        self._differentiates = True
        return self.losses_of(loss_fn, batches, weights, redraw=redraw)

    def reshard(self) -> None:
        """Frees parameters that a forward pass of FSDP has gathered. They hide the shards."""
        for module in self._modules():
            handle: Any = getattr(module, "_handle", None)  # of FSDP1, whose root stays gathered
            if hasattr(module, "set_reshard_after_forward"):  # an FSDPModule
                module.reshard()  # type: ignore[operator]
            elif getattr(handle, "uses_sharded_strategy", False):
                handle.reshard(True)

    def _modules(self) -> list[nn.Module]:
        """All modules of the state, without duplicates."""
        named = (item for item in self._state.values() if isinstance(item, nn.Module))
        return list({id(module): module for item in named for module in item.modules()}.values())

    def _parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of the optimizers and of the modules, which may override `parameters`."""
        params = [p for h in self._healings.values() for p in gradients.parameters(h.optimizer)]
        return params, [p for m in self._modules() for p in m._parameters.values() if p is not None]

    def _trained(self) -> dict[int, Tensor]:
        """Parameter's id -> each parameter that an optimizer trains; for DTensors, the local shard.

        If no module has a parameter of an optimizer, the optimizers train copies of the modules'
        parameters (master weights), and both belong to the weights.
        """
        self.reshard()
        params, held = self._parameters()
        if not {*map(id, params)} & {*map(id, held)}:
            params += held
        return {id(p): gradients.local_part(p) for p in params if p.requires_grad}

    def _followers(self) -> dict[Key, Tensor]:
        """What belongs to the trained parameters: batch statistics."""
        buffers = {
            (id(module), name): module._buffers.get(name)
            for module in self._modules()
            for name in STATISTICS
        }
        return {
            key: gradients.local_part(buffer)
            for key, buffer in buffers.items()
            if buffer is not None and not (is_lazy(buffer) or buffer.is_meta)
        }

    def _all(self) -> dict[Key, Tensor]:
        return {**self._trained(), **self._followers()}

    def _write(self, weights: Mapping[Key, Tensor]) -> None:
        if not weights:
            self.reshard()  # so that later steps see the shards
            return
        live = self._all()  # reshards
        for key, saved in weights.items():
            live[key].data.copy_(saved, non_blocking=live[key].is_cuda)

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Restores gradients, buffers, momentum encoders and public attributes.

        A forward pass may write into a buffer, or replace it by a new tensor. Attributes are the
        mode, the hidden state of a network, and a flag of `DistributedDataParallel`: after a
        forward pass without gradients it does not broadcast its buffers in the next step.
        """
        modules = self._modules()
        attributes = [{n: v for n, v in vars(m).items() if n[0] != "_"} for m in modules]
        # No forward pass averages into frozen parameters that are larger than the trained ones.
        trained = self._trained()
        frozen = [p for p in self._parameters()[1] if not (p.requires_grad or is_lazy(p))]
        fits = _size(frozen) <= _size(trained.values())
        averages = {id(p) for p in frozen if fits}
        written = [
            (table, name, tensor, tensor.detach().clone())
            for module in modules
            for table in (vars(module)["_buffers"], vars(module)["_parameters"])
            for name, tensor in table.items()
            if tensor is not None and (table is module._buffers or id(tensor) in averages)
        ]
        marks = [(vars(each), dict(vars(each))) for each in self._accumulations]
        grads = [(p, p.grad) for params in self._parameters() for p in params]
        for p, _ in grads:
            p.grad = None  # a backward pass would add to it
        for module in modules if self._differentiates else ():
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = False  # no reducer waits for a backward pass
        try:
            yield
        finally:
            for p, grad in grads:
                p.grad = grad
            for values, before in marks:
                values.update(before)
            for table, name, tensor, content in written:
                tensor.data.copy_(content)
                table[name] = tensor
            for module, values in zip(modules, attributes, strict=True):
                vars(module).update(values)


def _on_host(parts: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
    """Copies of tensors in host memory."""
    copies = {}
    for key, part in parts.items():
        # From an H100, 1 GB takes 0.02 s to pinned memory, which torch keeps; to other, 0.7 s.
        empty = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
        copies[key] = empty.copy_(part.detach(), non_blocking=part.is_cuda)
    for device in {part.device for part in parts.values() if part.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return copies


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _loss_of_copy(loss_fn: Callable[..., Any], batch: Any) -> Any:
    """The loss of a copy of a batch, on the host. SignalError if the function changes the copy."""
    given = copied(batch)
    before = dict(_marks(given))
    loss = loss_fn(given)
    if isinstance(loss, Tensor):
        loss = loss.detach()
        loss = (loss.full_tensor() if hasattr(loss, "full_tensor") else loss).tolist()  # type: ignore[operator]
    after = dict(_marks(given))
    changed = [path for path in before | after if before.get(path) != after.get(path)]
    if changed:
        raise SignalError(
            f"loss_fn changes {', '.join(changed[:3])}, but the Healer calls it again, also on "
            "earlier batches: write into a copy, as in batch = dict(batch) before batch.pop(), "
            "and x = x - 1 instead of x.sub_(1)"
        )
    return loss


def copied(batch: Any) -> Any:
    """A copy of a batch and of the dictionaries, lists, tuples, dataclasses and tensors in it."""
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    parts = {key: copied(part) for key, part in _parts(batch).items()}
    with suppress(Exception):  # an object that cannot be copied is shared
        if isinstance(batch, tuple):
            return tuple.__new__(type(batch), parts.values())  # its class may take other arguments
        copy_of = copy.copy(batch)
        for key, part in parts.items():
            if isinstance(batch, MutableMapping | list):
                copy_of[key] = part
            elif is_dataclass(batch):
                object.__setattr__(copy_of, key, part)  # frozen ones too
        return copy_of
    return batch


def _parts(batch: Any) -> dict[Any, Any]:
    """The parts of a mapping, a list, a tuple or a dataclass, by key, index or name."""
    if isinstance(batch, Mapping):
        return {key: batch[key] for key in batch}
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    names = (each.name for each in fields(batch)) if is_dataclass(batch) else ()
    return {name: getattr(batch, name) for name in names if hasattr(batch, name)}


def _marks(batch: Any, path: str = "batch") -> Iterator[tuple[str, tuple[int, int]]]:
    """The parts of a batch: path, identity and number of writes."""
    parts = _parts(batch)
    named = is_dataclass(batch)
    for key, part in parts.items():
        yield from _marks(part, f"{path}.{key}" if named else f"{path}[{key!r}]")
    if not parts and not isinstance(batch, Mapping | list | tuple):
        writes = batch._version if isinstance(batch, Tensor) and not batch.is_inference() else 0
        yield path, (id(batch), writes)
