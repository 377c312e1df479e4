"""Evaluates losses without gradients, also with other weights. The run is unchanged afterwards."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from healcore.core.signals import SignalError
from healcore.runtime.driver import SAMPLE, WeightsChanged
from healcore.torch import gradients
from healcore.torch.healing import Healing
from healcore.torch.live_state import RngState


class LossEvaluation:
    """Copies, replaces and evaluates the weights of a state.

    Modules stay in the mode that the loop has set. Buffers and flags of a wrapper outside of the
    state are not restored.
    """

    def __init__(self, state: Mapping[str, Any], healings: Mapping[str, Healing]) -> None:
        self._state = state
        self._healings = healings

    def copy_weights(self) -> dict[int, Tensor]:
        """Parameter's id -> host copy of each trained parameter; for DTensors, of local shards.

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
    ) -> list[float]:
        """See `Driver.losses_of`."""
        if weights is not None:
            shapes = [{k: w.shape for k, w in each.items()} for each in (weights, self._trained())]
            if shapes[0] != shapes[1]:
                raise WeightsChanged
        with self._restoring(), torch.no_grad():
            current = None if weights is None else self.copy_weights()
            try:
                if weights is not None:
                    self._write_weights(weights)
                return [float(_whole(loss_fn(copied(batch)))) for batch in batches]
            finally:
                if current is not None:
                    self._write_weights(current)
                else:
                    self.reshard()

    def try_loss_fn(self, loss_fn: Callable[..., Any], batch: Any) -> Any:
        """See `Driver.try_loss_fn`."""
        found: list[Any] = []
        given = copied(batch)
        before = dict(_marks(given))

        def call(_: Any) -> float:
            loss = _whole(loss_fn(given))
            found.append(loss.tolist() if isinstance(loss, Tensor) else loss)
            return 0.0

        self.losses_of(call, [None])
        after = dict(_marks(given))
        changed = [path for path in before | after if before.get(path) != after.get(path)]
        if changed:
            raise SignalError(
                f"loss_fn changes {', '.join(changed[:3])}, but the Healer calls it again, also on "
                "earlier batches: write into a copy, as in batch = dict(batch) before batch.pop(), "
                "and x = x - 1 instead of x.sub_(1)"
            )
        return found[0]

    def reshard(self) -> None:
        """Frees parameters that a forward pass of FSDP2 has gathered. They hide the shards."""
        for module in self._modules():
            if hasattr(module, "set_reshard_after_forward"):  # an FSDPModule
                module.reshard()  # type: ignore[operator]

    def _modules(self) -> list[nn.Module]:
        """All modules of the state, without duplicates."""
        named = (item for item in self._state.values() if isinstance(item, nn.Module))
        return list({id(module): module for item in named for module in item.modules()}.values())

    def _trained(self) -> dict[int, Tensor]:
        """Parameter's id -> each parameter that an optimizer trains; for DTensors, the local shard.

        Averages, momentum encoders and teachers stay current: an old momentum encoder would meet
        the current queue. If no module has a parameter of an optimizer, the optimizers train copies
        of the modules' parameters (master weights), and both belong to the weights.
        """
        self.reshard()
        params = [p for h in self._healings.values() for p in gradients.parameters(h.optimizer)]
        held = [p for module in self._modules() for p in module.parameters(recurse=False)]
        if not {*map(id, params)} & {*map(id, held)}:
            params += held
        trained = [p for p in params if p.requires_grad]
        return {id(p): p.to_local() if hasattr(p, "to_local") else p for p in trained}  # type: ignore[operator]

    def _write_weights(self, weights: Mapping[int, Tensor]) -> None:
        for key, part in self._trained().items():
            part.data.copy_(weights[key])

    @contextmanager
    def _restoring(self) -> Iterator[None]:
        """Restores buffers, public attributes and random states, which forward passes change.

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
        random = RngState().state_dict()
        try:
            yield
        finally:
            for module, name, buffer, content in buffers:
                buffer.data.copy_(content)
                module._buffers[name] = buffer
            for module, values in zip(modules, attributes, strict=True):
                vars(module).update(values)
            RngState().load_state_dict(random)


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
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss
