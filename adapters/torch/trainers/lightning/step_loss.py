"""`StepLoss`: the loss of a batch by the module's own `training_step`, which leaves no trace."""

from __future__ import annotations

import copy
import gc
import importlib.util
import types
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from healcore.core.decision import Cause
from healcore.runtime.faults.classification import classify
from healcore.runtime.run.witness.loss_function import NotComparable
from healcore.torch.trainers.hook import patched

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.loggers.logger import DummyLogger
else:
    from pytorch_lightning import LightningModule
    from pytorch_lightning.loggers.logger import DummyLogger

_MAX_PARTS = 20_000
"""Objects in an attribute of a module that are copied for an evaluation."""
_MAX_BYTES = 1 << 24
"""Size of the arrays in an attribute of a module that are copied for an evaluation."""
_SHARED = (nn.Module, type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)
"""Types whose values are not copied. Modules are restored by their own attributes."""
_SHARED_PACKAGES = {
    "lightning",
    "lightning_fabric",
    "logging",
    "omegaconf",
    "pytorch_lightning",
    "tokenizers",
    "torchaudio",
    "torchvision",
    "transformers",
}
"""Packages whose objects no `training_step` changes."""


class StepLoss:
    """Calls `training_step` on a batch again, and undoes what the call changes.

    `self.log`, `self.print` and the loggers do nothing during the call. The module and the modules
    in it (metrics of torchmetrics) have copies of their attributes meanwhile: counters, lists of
    outputs, generators. `TorchWeights` restores buffers, gradients, modes and global generators.

    Args:
        trainer: the Trainer, whose strategy moves the batch and sets the precision.
        as_passed: converts a batch of the Healer to the batch that Lightning passes.
    """

    def __init__(self, trainer: Any, as_passed: Callable[[Any], Any]) -> None:
        self._trainer = trainer
        self._as_passed = as_passed
        self._internal = {*vars(nn.Module()), *vars(LightningModule()), "_hparams"}
        """Attributes that the frameworks own."""

    @property
    def obstacle(self) -> str:
        """Reason why a call cannot be undone, or an empty string."""
        if not self._trainer.lightning_module.automatic_optimization:
            return "its optimization is manual, so training_step changes the weights itself"
        try:
            self._copied()
        except NotComparable as error:
            return str(error)
        return ""

    def __call__(self, batch: Any) -> Any:
        """The result of `training_step` for one batch.

        Args:
            batch: a batch of the Healer, on any device.

        Returns:
            The loss, or a dictionary with the key "loss".

        Raises:
            NotComparable: the call has raised, has returned no loss, or an attribute cannot be
                copied.
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        copied = self._copied()
        try:
            for attributes, _, copies in copied:
                attributes.update(copies)
            with ExitStack() as stack:
                for name in ("log", "log_dict", "print"):
                    stack.enter_context(patched(module, name, _silent))
                if trainer.loggers:
                    stack.enter_context(patched(trainer, "_loggers", [DummyLogger()]))
                result = self._training_step(batch)
        except Exception as error:
            # `TorchWeights` tries again with gradients, and comparisons with smaller parts.
            wants_gradients = not torch.is_grad_enabled() and "not require grad" in str(error)
            if wants_gradients or classify(error).cause is Cause.OOM:
                raise
            text = f"training_step raised {type(error).__name__} when it was called again: {error}"
            raise NotComparable(text) from error
        finally:
            for attributes, own, _ in copied:
                for name in attributes.keys() - own.keys() - self._internal:
                    del attributes[name]
                attributes.update(own)
        if result is None:
            raise NotComparable("training_step returns no loss")
        return result

    def _training_step(self, batch: Any) -> Any:
        """Calls `training_step` as Lightning does: precision, batch hooks, device, strategy."""
        trainer, loop = self._trainer, self._trainer.fit_loop.epoch_loop
        batch = trainer.precision_plugin.convert_input(self._as_passed(batch))
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
        arguments = loop._build_kwargs(OrderedDict(), batch, max(loop.batch_idx, 0))
        return trainer.strategy.training_step(*arguments.values())

    def _copied(self) -> list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """All attributes, the program's own and copies of these, of each module in the module.

        Raises NotComparable if an attribute is too large, or cannot be copied.
        """
        module, found = self._trainer.lightning_module, []
        memo = {id(each): each for each in (*module.parameters(), *module.buffers())}
        for path, each in module.named_modules(prefix="self"):
            attributes = vars(each)
            own = {name: v for name, v in attributes.items() if name not in self._internal}
            copies = {}
            for name, value in own.items():
                _prepare(value, f"{path}.{name}", memo)
                try:
                    copies[name] = copy.deepcopy(value, memo)
                except Exception as error:
                    text = f"{path}.{name} cannot be copied for the call: {error}"
                    raise NotComparable(text) from error
            found.append((attributes, own, copies))
        return found


def _silent(*_: Any, **__: Any) -> None: ...


def _prepare(value: Any, path: str, memo: dict[int, Any]) -> None:
    """Adds to the memo of `deepcopy` what it must not copy, and tensors, which it may refuse.

    Raises NotComparable if the value is too large.
    """
    pending, size = [value], 0
    seen: set[int] = set()
    while pending:
        each = pending.pop()
        if id(each) in seen or id(each) in memo:
            continue
        seen.add(id(each))
        package = type(each).__module__.partition(".")[0]
        if isinstance(each, _SHARED) or package in _SHARED_PACKAGES:
            memo[id(each)] = each
            continue
        if isinstance(each, Tensor | np.ndarray):
            size += each.nbytes
        if size > _MAX_BYTES or len(seen) > _MAX_PARTS:
            raise NotComparable(f"{path} is too large to be copied for the call")
        if isinstance(each, Tensor):
            memo[id(each)] = each.detach().clone()
        else:
            pending += gc.get_referents(each)
