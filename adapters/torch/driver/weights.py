"""`TorchWeights`: copies the weights of a state, and evaluates the copies. The run is unchanged."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from healcore.core.signals import SignalError
from healcore.runtime.data.random_states import isolated
from healcore.runtime.driver import WeightsChanged
from healcore.runtime.program_settings import DIGESTED
from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.driver.accumulation import Accumulation
from healcore.torch.live_state import State

Key: TypeAlias = int | tuple[int, str]
"""The id of a parameter, or the id of a module and the name of its buffer.

A forward pass may replace a buffer by a new tensor, so the id of a buffer does not last.
"""
STATISTICS = ("running_mean", "running_var")
"""Names of the floating buffers that a copy holds: the statistics of batch normalization."""


class TorchWeights:
    """Copies the weights of a state, and computes losses with earlier weights.

    The weights are the tensors that one comparison replaces together: the parameters that the
    optimizers train, and the statistics of batch normalization, which a layer in evaluation mode
    reads. If the statistics were not replaced, their damage would be in both losses of a
    comparison.

    Everything else stays as it is now, because it belongs to the program and not to the weights: a
    mask of pruning, a flag of quantization, a temperature, and the queue of a momentum encoder.
    Averages and target networks stay too: where the objective grows, as in TD learning, old weights
    with their old target have the lower loss in a healthy run (docs/decisions, 37).

    For a DTensor, the weights are the local shard. Buffers and flags of a wrapper outside of the
    state are not restored.

    The calls, in the order of a comparison:

        copy                        the weights of a healthy time, on the host
        losses_of(batches)          losses of the current weights
        losses_of(batches, copied)  losses of the copied weights on the same batches, by the same
                                    random numbers; afterwards the run is as before

    Args:
        state: the state of the run.
        healings: the handle of each optimizer, by name.
        accumulations: the gradients of each optimizer, whose marks a comparison must not change.

    Attributes:
        autocast: device type and dtype of the `torch.autocast` in which the loop computes its loss,
            or None.
    """

    def __init__(
        self,
        state: State,
        healings: Mapping[str, Healing],
        accumulations: Iterable[Accumulation],
    ) -> None:
        self._state = state
        self._healings = healings
        self._accumulations = accumulations
        self._differentiates = False
        """Whether `loss_fn` computes gradients, as for adversarial examples."""
        self.autocast: tuple[str, torch.dtype] | None = None
        self._newest: dict[Key, Tensor] = {}
        """The tensors of the newest copy that no optimizer trains."""

    def copy(self) -> dict[Key, Tensor]:
        """Copies the weights to the host: an accelerator's memory holds one set of weights.

        Copies share the tensors that do not change: a frozen teacher takes the memory of one copy.

        Returns:
            Key -> copy of each trained parameter and each statistic. Waits for the device.
        """
        followers = _on_host(self._followers())
        for key, tensor in followers.items():
            known = self._newest.get(key)
            if known is not None and known.dtype == tensor.dtype and torch.equal(known, tensor):
                followers[key] = known
        self._newest = followers
        return {**_on_host(self._trained()), **followers}

    def digest(self) -> str:
        """A digest of the trained parameters, equal in processes with equal weights.

        See `Driver.settings`. Parameters without data (lazy, meta) do not count.

        Returns:
            16 hexadecimal digits, of `DIGESTED` values of each parameter.
        """
        digest = hashlib.blake2b(digest_size=8)
        for part in self._trained().values():
            if is_lazy(part) or part.is_meta:
                continue
            flat = part.detach().reshape(-1)
            stride = max(1, flat.numel() // DIGESTED)
            sample = flat[::stride][:DIGESTED].to("cpu", copy=True)
            digest.update(bytes(sample.view(torch.uint8).numpy()))
        return digest.hexdigest()

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[Key, Tensor] | None = None,
        *,
        redraw: bool = False,
    ) -> list[Any]:
        """See `Driver.losses_of`.

        Without gradients, unless `loss_fn` needs them: then everything is computed again with
        gradients, and so are all later calls.

        Args:
            loss_fn: the user's function.
            batches: batches as the loop receives them.
            weights: the result of `copy`, or None for the current weights.
            redraw: whether to draw other random numbers than the next step will.

        Returns:
            The result of `loss_fn` for each batch, on the host.

        Raises:
            WeightsChanged: `weights` is a copy of other parameters.
            SignalError: `loss_fn` changes its batch.
        """
        if weights is not None and _shapes(weights) != _shapes(self._all()):
            raise WeightsChanged
        mixed: AbstractContextManager[object] = nullcontext()
        if self.autocast is not None:
            mixed = torch.autocast(*self.autocast)
        try:
            with isolated(), self._restoring(), torch.set_grad_enabled(self._differentiates), mixed:
                # `_restoring` restores everything but the trained parameters.
                current: dict[Key, Tensor] = {}
                if weights is not None:
                    current = _on_host(self._trained())
                try:
                    self._write(weights or {})
                    if redraw:
                        self._redraw()
                    return [_loss_of_copy(loss_fn, batch) for batch in batches]
                finally:
                    self._write(current)
        except RuntimeError as error:
            if self._differentiates or "not require grad" not in str(error):
                raise
        self._differentiates = True
        return self.losses_of(loss_fn, batches, weights, redraw=redraw)

    def _redraw(self) -> None:
        """Draws one number of each generator, so that all later numbers differ."""
        for device in {part.device for part in self._trained().values()}:
            torch.rand((), device=device)
        random.random()
        np.random.rand()  # noqa: NPY002 -- users do

    def reshard(self) -> None:
        """Frees parameters that a forward pass of FSDP has gathered. They hide the shards.

        FSDP keeps the root's parameters gathered after the forward pass. A write to them would be
        lost with the next gather, and a copy of them would be a copy of whole parameters.
        """
        for module in self._modules():
            handle: Any = getattr(module, "_handle", None)  # of FSDP1, whose root stays gathered
            if hasattr(module, "set_reshard_after_forward"):  # an FSDPModule
                module.reshard()  # type: ignore[operator]
            elif getattr(handle, "uses_sharded_strategy", False):
                handle.reshard(True)

    def _modules(self) -> list[nn.Module]:
        """All modules of the state, without duplicates."""
        modules: dict[int, nn.Module] = {}
        for value in self._state.values():
            if isinstance(value, nn.Module):
                for module in value.modules():
                    modules[id(module)] = module
        return list(modules.values())

    def _parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of the optimizers and of the modules, which may override `parameters`."""
        in_optimizers: list[Tensor] = []
        for healing in self._healings.values():
            in_optimizers += gradients.parameters(healing.optimizer)
        in_modules: list[Tensor] = []
        for module in self._modules():
            in_modules += [p for p in module._parameters.values() if p is not None]
        return in_optimizers, in_modules

    def _trained(self) -> dict[int, Tensor]:
        """Parameter's id -> each parameter that an optimizer trains; for DTensors, the local shard.

        If no module has a parameter of an optimizer, the optimizers train copies of the modules'
        parameters (master weights), and both belong to the weights.
        """
        self.reshard()
        params, in_modules = self._parameters()
        if {id(p) for p in params}.isdisjoint(id(p) for p in in_modules):
            params += in_modules
        return {id(p): gradients.local_part(p) for p in params if p.requires_grad}

    def _followers(self) -> dict[Key, Tensor]:
        """The batch statistics, which belong to the trained parameters."""
        followers: dict[Key, Tensor] = {}
        for module in self._modules():
            for name in STATISTICS:
                buffer = module._buffers.get(name)
                if buffer is not None and not (is_lazy(buffer) or buffer.is_meta):
                    followers[id(module), name] = gradients.local_part(buffer)
        return followers

    def _all(self) -> dict[Key, Tensor]:
        """All live tensors that a copy replaces."""
        return {**self._trained(), **self._followers()}

    def _write(self, weights: Mapping[Key, Tensor]) -> None:
        """Writes these weights into the live tensors."""
        if not weights:
            self.reshard()  # so that later steps see the shards
            return
        # Reading all parameters shards them again.
        live = self._all()
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
        attributes = [_public_attributes(module) for module in modules]
        contents = self._written_by_forward(modules)
        marks = [(accumulation, dict(vars(accumulation))) for accumulation in self._accumulations]
        grads: list[tuple[Tensor, Tensor | None]] = []
        in_optimizers, in_modules = self._parameters()
        for p in (*in_optimizers, *in_modules):
            grads.append((p, p.grad))
        for p, _ in grads:
            p.grad = None  # a backward pass would add to it
        if self._differentiates:
            for module in modules:
                if isinstance(module, DistributedDataParallel):
                    # No reducer waits for a backward pass.
                    module.require_backward_grad_sync = False
        try:
            yield
        finally:
            for p, grad in grads:
                p.grad = grad
            for accumulation, values in marks:
                vars(accumulation).update(values)
            for saved in contents:
                saved.tensor.data.copy_(saved.content)
                saved.table[saved.name] = saved.tensor
            for module, values in zip(modules, attributes, strict=True):
                vars(module).update(values)

    def _written_by_forward(self, modules: Iterable[nn.Module]) -> list[_SavedTensor]:
        """Copies of what a forward pass may write: buffers, and momentum encoders."""
        # A momentum encoder has frozen parameters, into which a forward pass averages. No forward
        # pass averages into frozen parameters that are larger than the trained ones.
        trained = self._trained()
        frozen = [p for p in self._parameters()[1] if not (p.requires_grad or is_lazy(p))]
        encoders: set[int] = set()
        if _size(frozen) <= _size(trained.values()):
            encoders.update(id(p) for p in frozen)
        saved: list[_SavedTensor] = []
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    content = buffer.detach().clone()
                    saved.append(_SavedTensor(module._buffers, name, buffer, content))
            for name, p in module._parameters.items():
                if p is not None and id(p) in encoders:
                    content = p.detach().clone()
                    saved.append(_SavedTensor(module._parameters, name, p, content))
        return saved


class _SavedTensor(NamedTuple):
    """A buffer or parameter of a module, with a copy of its content."""

    table: dict[str, Any]
    """The module's buffers or parameters, in which the tensor is."""
    name: str
    """Key in `table`."""
    tensor: Tensor
    """The tensor in use."""
    content: Tensor
    """A copy of its content, of the same shape and dtype."""


def _public_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name[0] != "_"}


def _shapes(weights: Mapping[Key, Tensor]) -> dict[Key, torch.Size]:
    return {key: tensor.shape for key, tensor in weights.items()}


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
    batch = copy_of_batch(batch)
    before = dict(_marks(batch))
    loss = loss_fn(batch)
    if isinstance(loss, Tensor):
        loss = loss.detach()
        if hasattr(loss, "full_tensor"):  # a DTensor
            loss = loss.full_tensor()  # type: ignore[operator]
        loss = loss.tolist()
    after = dict(_marks(batch))
    changed = [path for path in before | after if before.get(path) != after.get(path)]
    if changed:
        raise SignalError(
            f"loss_fn changes {', '.join(changed[:3])}, but the Healer calls it again, also on "
            "earlier batches: write into a copy, as in batch = dict(batch) before batch.pop(), "
            "and x = x - 1 instead of x.sub_(1)"
        )
    return loss


def copy_of_batch(batch: Any) -> Any:
    """A copy of a batch and of the dictionaries, lists, tuples, dataclasses and tensors in it.

    Args:
        batch: a batch as the loop receives it.

    Returns:
        The copy. Objects of other kinds, and objects that cannot be copied, are shared with it.
    """
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    parts = {key: copy_of_batch(part) for key, part in _parts(batch).items()}
    with suppress(Exception):  # an object that cannot be copied is shared
        if isinstance(batch, tuple):
            return tuple.__new__(type(batch), parts.values())  # its class may take other arguments
        copy_of = copy.copy(batch)
        for key, part in parts.items():
            if isinstance(batch, MutableMapping | list):
                copy_of[key] = part
            elif is_dataclass(batch):
                object.__setattr__(copy_of, key, part)  # also of a frozen dataclass
        return copy_of
    return batch


def _parts(batch: Any) -> dict[Any, Any]:
    """The parts of a mapping, a list, a tuple or a dataclass, by key, index or name."""
    if isinstance(batch, Mapping):
        return {key: batch[key] for key in batch}
    if isinstance(batch, list | tuple):
        return dict(enumerate(batch))
    parts: dict[Any, Any] = {}
    if is_dataclass(batch):
        for each in fields(batch):
            if hasattr(batch, each.name):  # a field may be unset
                parts[each.name] = getattr(batch, each.name)
    return parts


def _marks(batch: Any, path: str = "batch") -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the parts of a batch: path, identity and number of writes."""
    parts = _parts(batch)
    for key, part in parts.items():
        if is_dataclass(batch):
            yield from _marks(part, f"{path}.{key}")
        else:
            yield from _marks(part, f"{path}[{key!r}]")
    if not parts and not isinstance(batch, Mapping | list | tuple):
        writes = 0
        if isinstance(batch, Tensor) and not batch.is_inference():
            writes = batch._version
        yield path, (id(batch), writes)
