"""Counts how often the host waits, where torch reads a tensor's value."""

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

SYNCS = ("aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero")


class CountSyncs(TorchDispatchMode):
    """Counts the operations that bring a value to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.operations = 0
        """All operations, synchronizing or not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.count += str(func).startswith(SYNCS)
        return func(*args, **(kwargs or {}))
