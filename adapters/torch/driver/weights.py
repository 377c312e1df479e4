"""The weights of a state: copied and evaluated, and sampled to notice that they were replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import Parameter, is_lazy

from healcore.core.signals import SignalError
from healcore.runtime.data.random_states import isolated
from healcore.runtime.driver import WeightsChanged
from healcore.torch import gradients, live_state
from healcore.torch.attachment import Healing
from healcore.torch.driver.followed_optimizer import FollowedOptimizer
from healcore.torch.live_state import State, modules

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
        followed: the optimizers, whose marks of backward passes a comparison must not change.

    Attributes:
        autocast: device type and dtype of the `torch.autocast` in which the loop computes its loss,
            or None.
    """

    def __init__(
        self,
        state: State,
        healings: Mapping[str, Healing],
        followed: Iterable[FollowedOptimizer],
    ) -> None:
        self._state = state
        self._healings = healings
        self._followed = followed
        self._differentiates = False
        """Whether `loss_fn` computes gradients, as for adversarial examples."""
        self.autocast: tuple[str, torch.dtype] | None = None

    def copy(self) -> dict[Key, Tensor]:
        """Copies the weights to the host: an accelerator's memory holds one set of weights.

        Returns:
            Key -> copy of each trained parameter and each statistic. Waits for the device.
        """
        weights = self._weights()
        copies: dict[Key, Tensor] = {}
        for key, part in weights.items():
            # From an H100, 1 GB takes 0.02 s to pinned memory, which torch keeps; to other, 0.7 s.
            empty = torch.empty_like(part, device="cpu", pin_memory=part.is_cuda)
            copies[key] = empty.copy_(part.detach(), non_blocking=part.is_cuda)
        for device in {part.device for part in weights.values() if part.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def digest(self) -> str:
        """A digest of the weights, equal in processes with equal weights. See `Driver.settings`.

        Returns:
            16 hexadecimal digits, of some bytes of each parameter.
        """
        digest = hashlib.blake2b(digest_size=8)
        for part in self._weights().values():
            digest.update(bytes(sample(part).cpu().numpy()))
        return digest.hexdigest()

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[Key, Tensor] | None = None,
    ) -> list[Any]:
        """See `Driver.losses_of`.

        Without gradients, unless `loss_fn` needs them: then everything is computed again with
        gradients, and so are all later calls.

        Args:
            loss_fn: the user's function.
            batches: batches as the loop receives them.
            weights: the result of `copy`, or None for the current weights.

        Returns:
            The result of `loss_fn` for each batch, on the host.

        Raises:
            WeightsChanged: `weights` is a copy of other parameters.
            SignalError: `loss_fn` changes its batch.
        """
        if weights is not None and _shapes(weights) != _shapes(self._weights()):
            raise WeightsChanged
        mixed: AbstractContextManager[object] = nullcontext()
        if self.autocast is not None:
            mixed = torch.autocast(*self.autocast)
        try:
            with isolated(), self._replaced_by(weights), mixed:
                return [_loss(loss_fn, batch) for batch in batches]
        except RuntimeError as error:
            if self._differentiates or "not require grad" not in str(error):
                raise
        self._differentiates = True
        return self.losses_of(loss_fn, batches, weights)

    def reshard(self) -> None:
        """Frees parameters that a forward pass of FSDP has gathered. They hide the shards.

        FSDP keeps the root's parameters gathered after the forward pass. A write to them would be
        lost with the next gather, and a copy of them would be a copy of whole parameters.
        """
        for module in live_state.modules(self._state).values():
            handle: Any = getattr(module, "_handle", None)  # of FSDP1, whose root stays gathered
            if hasattr(module, "set_reshard_after_forward"):  # an FSDPModule
                module.reshard()  # type: ignore[operator]
            elif getattr(handle, "uses_sharded_strategy", False):
                handle.reshard(True)

    def _parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of the optimizers and of the modules, which may override `parameters`."""
        in_optimizers: list[Tensor] = []
        for healing in self._healings.values():
            in_optimizers += gradients.parameters(healing.optimizer)
        in_modules: list[Tensor] = []
        for module in live_state.modules(self._state).values():
            in_modules += [p for p in module._parameters.values() if p is not None]
        return in_optimizers, in_modules

    def _weights(self) -> dict[Key, Tensor]:
        """The live tensors that a copy replaces; for DTensors, the local shards.

        If no module has a parameter of an optimizer, the optimizers train copies of the modules'
        parameters (master weights), and both belong to the weights.
        """
        self.reshard()
        trained, in_modules = self._parameters()
        if {id(p) for p in trained}.isdisjoint(id(p) for p in in_modules):
            trained += in_modules
        found: dict[Key, Tensor] = {id(p): p for p in trained if p.requires_grad}
        for module in live_state.modules(self._state).values():
            for name in STATISTICS:
                buffer = module._buffers.get(name)
                if buffer is not None:
                    found[id(module), name] = buffer
        weights: dict[Key, Tensor] = {}
        for key, tensor in found.items():
            if not (is_lazy(tensor) or tensor.is_meta):  # they have no data yet
                weights[key] = gradients.local_part(tensor)
        return weights

    @contextmanager
    def _replaced_by(self, weights: Mapping[Key, Tensor] | None) -> Iterator[None]:
        """Replaces the weights, without gradients unless `loss_fn` needs them.

        At the end it restores them, and gradients, buffers, momentum encoders and attributes.

        A forward pass may write into a buffer, or replace it by a new tensor. Attributes are the
        mode, the hidden state of a network, and a flag of `DistributedDataParallel`: after a
        forward pass without gradients it does not broadcast its buffers in the next step.
        """
        modules = [*live_state.modules(self._state).values()]
        in_optimizers, in_modules = self._parameters()
        grads = [(p, p.grad) for p in (*in_optimizers, *in_modules)]
        # A momentum encoder has frozen parameters, into which a forward pass averages. No forward
        # pass averages into frozen parameters that are larger than the trained ones.
        written = [p for p in in_modules if not (p.requires_grad or is_lazy(p))]
        if _size(written) > _size(self._weights().values()):
            written = []
        tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """The attributes of modules and of the followed optimizers, and a copy of each table."""
        for module in modules:
            public = {name: value for name, value in vars(module).items() if name[0] != "_"}
            tables += [(vars(module), public), (module._buffers, dict(module._buffers))]
            written += [buffer for buffer in module._buffers.values() if buffer is not None]
        for each in self._followed:
            tables.append((vars(each), dict(vars(each))))
        contents = [(tensor, tensor.detach().clone()) for tensor in written]
        for p, _ in grads:
            p.grad = None  # a backward pass would add to it
        if self._differentiates:
            for module in modules:
                if isinstance(module, DistributedDataParallel):
                    # No reducer waits for a backward pass.
                    module.require_backward_grad_sync = False
        current: Mapping[Key, Tensor] = {}
        if weights is not None:
            current = self.copy()
        try:
            _write(weights or {}, self._weights())
            with torch.set_grad_enabled(self._differentiates):
                yield
        finally:
            _write(current, self._weights())  # later steps see the shards again
            for p, grad in grads:
                p.grad = grad
            for table, values in tables:
                table.update(values)
            for tensor, content in contents:
                tensor.data.copy_(content)


def _write(weights: Mapping[Key, Tensor], live: Mapping[Key, Tensor]) -> None:
    """Writes weights into the live tensors."""
    for key, saved in weights.items():
        live[key].data.copy_(saved, non_blocking=live[key].is_cuda)


def _shapes(weights: Mapping[Key, Tensor]) -> dict[Key, torch.Size]:
    return {key: tensor.shape for key, tensor in weights.items()}


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _loss(loss_fn: Callable[..., Any], batch: Any) -> Any:
    """The loss of a batch, on the host. SignalError if the function changes the batch."""
    before = _writes(batch)
    loss = loss_fn(batch)
    if _writes(batch) != before:
        raise SignalError(
            "loss_fn changes its batch, but the Healer calls it again, also on earlier batches: "
            "write into a copy, as in batch = dict(batch) before batch.pop(), and x = x - 1 "
            "instead of x.sub_(1)"
        )
    if isinstance(loss, Tensor):
        loss = loss.detach()
        if hasattr(loss, "full_tensor"):  # a DTensor
            loss = loss.full_tensor()  # type: ignore[operator]
        loss = loss.tolist()
    return loss


def _writes(batch: Any) -> list[tuple[int, int]]:
    """Identity and number of writes of each tensor in a batch."""
    tensors = [each for each in live_state.tensors_in(batch, 1000) if not each.is_inference()]
    return [(id(each), each._version) for each in tensors]


# -- a sample, to notice that the program has replaced the weights ---------------------------------

SAMPLE_BYTES = 64
"""Bytes of each parameter in the sample, from its middle."""


class WeightSample:
    """Keeps a few bytes of the weights, to notice that the program has replaced the weights.

    Programs do so for an evaluation: they copy averaged weights into the model, load the best
    weights, call `.half()`, or merge adapters. If such a program ends there, these weights are not
    a state of the training, and the next start would train on from them. Neither `Tensor._version`
    nor the address shows it, because EMA classes write `p.data.copy_(...)`. An average replaces all
    trained parameters, so a few bytes of a few of them are enough.

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
