"""`StepLoss`: the loss of a batch by the module's own `training_step`, which leaves no trace."""

from __future__ import annotations

import enum
import importlib.util
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from healcore.core.decision import Cause
from healcore.runtime.faults.classification import classify
from healcore.runtime.run.witness.loss_function import NotComparable
from healcore.torch.trainers.hook import patched
from healcore.torch.trainers.lightning import trainer_internals as internals
from healcore.torch.trainers.lightning.trainer_internals import Batch, LightningTrainer

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.loggers.logger import DummyLogger
else:
    from pytorch_lightning import LightningModule
    from pytorch_lightning.loggers.logger import DummyLogger

Undo = Callable[[], object]

_MAX_PARTS = 20_000
"""Objects in the attributes of a module that are looked at before each evaluation."""
_MAX_BYTES = 1 << 24
"""Size of the largest array that is copied before each evaluation."""
_CONSTANT = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type(...),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    enum.Enum,
    np.generic,
    np.dtype,
    torch.dtype,
    torch.device,
    torch.Size,
)
"""Types whose values no `training_step` changes."""
_CONSTANT_PACKAGES = {
    "argparse",
    "datetime",
    "functools",
    "inspect",
    "logging",
    "pathlib",
    "re",
    "typing",
    "lightning",
    "lightning_fabric",
    "pytorch_lightning",
    "torch",
    "torchaudio",
    "torchvision",
    "omegaconf",
    "tokenizers",
    "torchmetrics",
    "transformers",
}
"""Packages whose objects, apart from modules and tensors, no `training_step` changes."""


class StepLoss:
    """Calls `training_step` on a batch again, and undoes what the call changes.

    `self.log`, `self.print` and the loggers do nothing during the call. Afterwards the attributes
    of the module and of the modules in it (metrics of torchmetrics, counters, lists of outputs)
    have their earlier values; `TorchWeights` restores buffers, gradients, modes and generators.

    Args:
        trainer: the Trainer, whose strategy moves the batch and sets the precision.
        as_passed: converts a batch of the Healer to the batch that Lightning passes.
    """

    def __init__(self, trainer: LightningTrainer, as_passed: Callable[[Batch], Batch]) -> None:
        self._trainer = trainer
        self._as_passed = as_passed
        self._internal = {*vars(nn.Module()), *vars(LightningModule()), internals.HPARAMS}
        """Attributes that the frameworks own."""

    @property
    def obstacle(self) -> str:
        """Reason why a call cannot be undone, or an empty string.

        Looks at all attributes of the module, as a call does. A module that keeps a large array or
        an object of unknown type in an attribute cannot be restored, so its weights are not
        compared.
        """
        module = self._trainer.lightning_module
        if not module.automatic_optimization:
            return "its optimization is manual, so training_step changes the weights itself"
        try:
            for _ in self._undo_attributes():
                pass
        except NotComparable as error:
            return str(error)
        return ""

    def __call__(self, batch: Batch) -> Any:
        """The result of `training_step` for one batch.

        Args:
            batch: a batch of the Healer, on any device.

        Returns:
            The loss, or a dictionary with the key "loss".

        Raises:
            NotComparable: the call has raised, has returned no loss, or has changed what cannot be
                restored.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        undo = [*self._undo_attributes()]
        try:
            with ExitStack() as stack:
                for name in ("log", "log_dict", "print"):
                    stack.enter_context(patched(module, name, _silent))
                if trainer.loggers:
                    stack.enter_context(internals.replaced_loggers(trainer, [DummyLogger()]))
                result = internals.training_step(trainer, self._as_passed(batch))
        except Exception as error:
            # `TorchWeights` tries again with gradients, and comparisons with smaller parts.
            wants_gradients = not torch.is_grad_enabled() and "not require grad" in str(error)
            if wants_gradients or classify(error).cause is Cause.OOM:
                raise
            text = f"training_step raised {type(error).__name__} when it was called again: {error}"
            raise NotComparable(text) from error
        finally:
            for restore in reversed(undo):
                restore()
        if result is None:
            raise NotComparable("training_step returns no loss")
        return result

    def _undo_attributes(self) -> Iterator[Undo]:
        """Yields functions that restore the attributes of all modules.

        Raises NotComparable if an attribute holds something that cannot be restored.
        """
        known: set[int] = set()
        for path, module in self._trainer.lightning_module.named_modules(prefix="self"):
            # A metric has internal attributes too, such as the number of its updates.
            attributes = vars(module)
            own = {name: v for name, v in attributes.items() if name not in self._internal}
            yield partial(self._restore, attributes, own)
            for name, value in own.items():
                yield from _undo(value, f"{path}.{name}", known)

    def _restore(self, attributes: dict[str, Any], own: Mapping[str, Any]) -> None:
        """Sets the attributes of a module back to `own`, except attributes of the frameworks."""
        for name in attributes.keys() - own.keys() - self._internal:
            del attributes[name]
        attributes.update(own)


def _silent(*_: Any, **__: Any) -> None: ...


def _undo(value: Any, path: str, known: set[int]) -> Iterator[Undo]:
    """Yields functions that restore a value and everything in it, in place."""
    if isinstance(value, (*_CONSTANT, nn.Module)) or id(value) in known:
        return
    known.add(id(value))
    if len(known) > _MAX_PARTS:
        raise NotComparable(f"{path} and the other attributes hold more than {_MAX_PARTS} objects")
    if isinstance(value, Tensor):
        if value.numel() * value.element_size() <= _MAX_BYTES:
            copied = value.detach().clone()
            yield partial(_write_if_changed, value, copied)
        elif not value.is_inference():
            yield partial(_raise_if_changed, value, value._version, path)
    elif isinstance(value, np.ndarray):
        if value.nbytes > _MAX_BYTES or value.dtype.hasobject:
            raise NotComparable(f"{path} is a large array, which training_step may change")
        if value.flags.writeable:
            yield partial(np.copyto, value, value.copy())
    elif isinstance(value, np.random.Generator):
        generator = value.bit_generator
        yield partial(setattr, generator, "state", generator.state)
    elif isinstance(value, random.Random):
        yield partial(value.setstate, value.getstate())
    elif isinstance(value, torch.Generator):
        yield partial(value.set_state, value.get_state())
    elif isinstance(value, list | deque):
        yield partial(_replace, value, list(value))
        for i, item in enumerate(value):
            yield from _undo(item, f"{path}[{i}]", known)
    elif isinstance(value, set):
        yield partial(_replace, value, set(value))
    elif isinstance(value, tuple | frozenset):
        for i, item in enumerate(value):
            yield from _undo(item, f"{path}[{i}]", known)
    elif isinstance(value, MutableMapping):
        yield partial(_replace, value, dict(value))
        for key, item in value.items():
            yield from _undo(item, f"{path}[{key!r}]", known)
    elif type(value).__module__.partition(".")[0] not in _CONSTANT_PACKAGES:
        yield from _undo_object(value, path, known)


def _undo_object(value: Any, path: str, known: set[int]) -> Iterator[Undo]:
    """Yields functions that restore the attributes of an object of the program."""
    attributes = getattr(value, "__dict__", None)
    slots = any("__slots__" in vars(kind) for kind in type(value).__mro__)
    if not isinstance(attributes, dict) or slots:
        raise NotComparable(
            f"{path} is a {type(value).__name__}, whose changes by training_step cannot be undone"
        )
    yield partial(_replace, attributes, dict(attributes))
    for name, item in attributes.items():
        yield from _undo(item, f"{path}.{name}", known)


def _replace(container: Any, items: Any) -> None:
    """Gives a list, a deque, a set or a dictionary earlier items, in place."""
    container.clear()
    if isinstance(items, list):
        container.extend(items)
    else:
        container.update(items)


def _write_if_changed(tensor: Tensor, copied: Tensor) -> None:
    """Restores the values of a tensor in place.

    A write of the same values would change the tensor's version, which autograd checks.
    """
    if not torch.equal(tensor.detach(), copied):
        tensor.data.copy_(copied)


def _raise_if_changed(tensor: Tensor, version: int, path: str) -> None:
    """Raises NotComparable if a tensor without a copy was written in place since `version`."""
    if tensor._version != version:
        raise NotComparable(f"training_step has changed {path}, a tensor that is too large to copy")
