"""Evaluates losses, also with other weights. The run is unchanged afterwards."""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from healcore.core.signals import SignalError
from healcore.runtime.dominance.loss_function import undone
from healcore.runtime.driver import SAMPLE, WeightsChanged
from healcore.torch import gradients
from healcore.torch.driver.gradient_window import Accumulation
from healcore.torch.healing import Healing
from healcore.torch.live_state import RngState


class LossEvaluation:
    """Copies, replaces and evaluates the weights of a state.

    Modules stay in the mode that the loop has set. Buffers and flags of a wrapper outside of the
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

    def copy_weights(self) -> dict[int, Tensor]:
        """See `Driver.copy_weights`: parameter's id -> host copy; for DTensors, of local shards.

        On the host, so that an accelerator's memory holds only one set of weights.
        """
        return {key: part.detach().to("cpu", copy=True) for key, part in self._trained().items()}

    def weights_digest(self) -> str:
        """See `Driver.weights_digest`. Parameters without data (lazy, meta) do not count."""
        found = hashlib.blake2b(digest_size=8)
        for part in self._trained().values():
            if not (is_lazy(part) or part.is_meta):
                flat = part.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].to("cpu", copy=True)
                found.update(bytes(sample.view(torch.uint8).numpy()))
        return found.hexdigest()

    def losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[int, Tensor] | None = None,
        *,
        redraw: bool = False,
    ) -> list[Any]:
        """See `Driver.losses_of`."""
        if weights is not None:
            shapes = [{k: w.shape for k, w in each.items()} for each in (weights, self._trained())]
            if shapes[0] != shapes[1]:
                raise WeightsChanged
        try:
            return self._losses_of(loss_fn, batches, weights, redraw)
        except RuntimeError as error:
            if self._differentiates or "not require grad" not in str(error):
                raise
            self._differentiates = True
            return self._losses_of(loss_fn, batches, weights, redraw)

    def _losses_of(
        self,
        loss_fn: Callable[..., Any],
        batches: Iterable[Any],
        weights: Mapping[int, Tensor] | None,
        redraw: bool,
    ) -> list[Any]:
        with undone(), self._restoring(), torch.set_grad_enabled(self._differentiates):
            current = None if weights is None else self.copy_weights()
            try:
                if weights is not None:
                    self._write_weights(weights)
                if redraw:
                    for device in {part.device for part in self._trained().values()}:
                        torch.rand((), device=device)
                    random.random()
                    np.random.rand()  # noqa: NPY002 -- users do
                return [_loss_of_copy(loss_fn, batch) for batch in batches]
            finally:
                if current is not None:
                    self._write_weights(current)
                else:
                    self.reshard()

    def reshard(self) -> None:
        """Frees parameters that a forward pass of FSDP2 has gathered. They hide the shards."""
        for module in self._modules():
            if hasattr(module, "set_reshard_after_forward"):  # an FSDPModule
                module.reshard()  # type: ignore[operator]

    def _modules(self) -> list[nn.Module]:
        """All modules of the state, without duplicates."""
        named = (item for item in self._state.values() if isinstance(item, nn.Module))
        return list({id(module): module for item in named for module in item.modules()}.values())

    def _parameters(self) -> tuple[list[Tensor], list[Tensor]]:
        """The parameters of the optimizers, and the parameters of the modules."""
        params = [p for h in self._healings.values() for p in gradients.parameters(h.optimizer)]
        return params, [p for module in self._modules() for p in module.parameters(recurse=False)]

    def _trained(self) -> dict[int, Tensor]:
        """Parameter's id -> each parameter that an optimizer trains; for DTensors, the local shard.

        Averages, momentum encoders and teachers stay current: an old momentum encoder would meet
        the current queue. If no module has a parameter of an optimizer, the optimizers train copies
        of the modules' parameters (master weights), and both belong to the weights.
        """
        self.reshard()
        params, held = self._parameters()
        if not {*map(id, params)} & {*map(id, held)}:
            params += held
        trained = [p for p in params if p.requires_grad]
        return {id(p): p.to_local() if hasattr(p, "to_local") else p for p in trained}  # type: ignore[operator]

    def _write_weights(self, weights: Mapping[int, Tensor]) -> None:
        for key, part in self._trained().items():
            part.data.copy_(weights[key])

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Restores gradients, buffers, public attributes and random states.

        A forward pass may write into a buffer, or replace it by a new tensor. Attributes are the
        mode, the hidden state of a network, and a flag of `DistributedDataParallel`: after a
        forward pass without gradients it does not broadcast its buffers in the next step.
        """
        modules = self._modules()
        attributes = [{n: v for n, v in vars(m).items() if n[0] != "_"} for m in modules]
        buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]
        generators = RngState().state_dict()
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
            for module, name, buffer, content in buffers:
                buffer.data.copy_(content)
                module._buffers[name] = buffer
            for module, values in zip(modules, attributes, strict=True):
                vars(module).update(values)
            RngState().load_state_dict(generators)


def _loss_of_copy(loss_fn: Callable[..., Any], batch: Any) -> Any:
    """The loss of a copy of a batch, on the host. SignalError if the function changes the copy."""
    given = copied(batch)
    before = dict(_marks(given))
    loss = _whole(loss_fn(given))
    loss = loss.tolist() if isinstance(loss, Tensor) else loss
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
    if isinstance(batch, MutableMapping):
        copy_of = copy.copy(batch)
        for key in batch:
            copy_of[key] = copied(batch[key])
        return copy_of
    if isinstance(batch, list | tuple):
        kind: Any = type(batch)
        return getattr(kind, "_make", kind)([copied(each) for each in batch])
    with suppress(Exception):  # an object that cannot be copied is shared
        copy_of = copy.copy(batch)
        for name in _fields(batch):
            object.__setattr__(copy_of, name, copied(getattr(batch, name)))  # frozen ones too
        return copy_of
    return batch


def _fields(batch: Any) -> list[str]:
    """The names of the values that a dataclass has."""
    names = (each.name for each in fields(batch)) if is_dataclass(batch) else ()
    return [name for name in names if hasattr(batch, name)]


def _marks(batch: Any, path: str = "batch") -> Iterator[tuple[str, tuple[int, int]]]:
    """The parts of a batch: path, identity and number of writes."""
    if isinstance(batch, Mapping):
        for key in batch:
            yield from _marks(batch[key], f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for i, each in enumerate(batch):
            yield from _marks(each, f"{path}[{i}]")
    elif names := _fields(batch):
        for name in names:
            yield from _marks(getattr(batch, name), f"{path}.{name}")
    else:
        counts_writes = isinstance(batch, Tensor) and not batch.is_inference()
        yield path, (id(batch), batch._version if counts_writes else 0)


def _whole(loss: Any) -> Any:
    """The loss; for a DTensor, the value over all ranks."""
    loss = loss.detach() if isinstance(loss, Tensor) else loss
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss
