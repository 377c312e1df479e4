"""What an evaluation by the Healer changes besides the weights, and training must not notice."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from healcore.torch.driver.live_state import RngState


class Undisturbed:
    """Modes, buffers and random states as they are now, to be restored after forward passes.

    A forward pass may write into a buffer, or replace it by a new tensor. A
    `DistributedDataParallel` does not broadcast its buffers in the step after a forward pass
    without gradients, so its flag is restored. A wrapper that is not in the state is not known.

    Args:
        modules: all modules, once each.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modes = [(module, module.training) for module in modules]
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in modules
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]
        self._broadcasts = [
            (module, module.require_forward_param_sync)
            for module in modules
            if hasattr(module, "require_forward_param_sync")  # DistributedDataParallel
        ]
        self._generators = RngState().state_dict()

    def restore(self) -> None:
        """Restores them."""
        for module, name, buffer, content in self._buffers:
            buffer.data.copy_(content)
            module._buffers[name] = buffer
        for module, mode in self._modes:
            module.training = mode
        for module, broadcasts in self._broadcasts:
            module.require_forward_param_sync = broadcasts
        RngState().load_state_dict(self._generators)
