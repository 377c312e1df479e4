"""What can be wrong with a loader."""

from __future__ import annotations

from healcore.core.errors import HealcoreError


class DataError(HealcoreError, RuntimeError):
    """What the data cursor refuses or fails at. What a loader raises itself comes as it is."""


class UnusableLoader(DataError, TypeError):
    """It is no loader, or not one that can do what is asked."""


class EmptyLoader(DataError):
    """A whole epoch without a batch."""

    def __init__(self, epoch: int, loader: str) -> None:
        super().__init__(epoch, loader)
        self.epoch = epoch
        self.loader = loader

    def __str__(self) -> str:
        """Which epoch, and the usual reasons."""
        if self.epoch == 0:
            hint = "is the dataset empty, or smaller than one batch with drop_last=True?"
        else:
            hint = (
                "it can be gone through only once: pass something that starts anew with every "
                "iter(), or epochs=1"
            )
        return f"{self.loader} gave no batch in epoch {self.epoch}: {hint}"
