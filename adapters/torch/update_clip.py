"""Clips the update that a torch optimizer makes, for policies with `[update_clip]`.

`optimizer.step()` writes the new parameters over the old ones, so that its update is known only as
their difference: this keeps one copy of the parameters that have gradients, made before each step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from healcore.torch.engines import LiveEngine
from healcore.torch.gradients import local
from healcore.torch.signal_allreduce import SignalAllReduce

# Private, but every foreach optimizer uses them.
_copy = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
_subtract = torch._foreach_sub_  # pyright: ignore[reportPrivateImportUsage]
_add = torch._foreach_add_  # pyright: ignore[reportPrivateImportUsage]


class UpdateClip:
    """Judges and shortens the updates of one optimizer, on the device `home` of its engine."""

    def __init__(
        self, live_engine: LiveEngine, all_reduce: SignalAllReduce, home: torch.device
    ) -> None:
        self._engine = live_engine
        self._all_reduce = all_reduce
        self._home = home
        self._copies: dict[Tensor, Tensor] = {}
        """Of a DTensor, of this rank's part."""
        self._params: list[Tensor] | None = None
        self._skipped: bool | Tensor = False
        self._lr_scale: float | Tensor = 1.0

    @property
    def nbytes(self) -> int:
        """Size of the copy."""
        return sum(copy.nbytes for copy in self._copies.values())

    def before(
        self, params: Sequence[Tensor], skipped: bool | Tensor, lr_scale: float | Tensor
    ) -> None:
        """Copies the parameters; call it once the step is judged, before the optimizer moves them.

        `skipped` and `lr_scale` are of this step's order: a bool or a 0-d tensor of 0 or 1, and a
        number or a 0-d tensor.
        """
        self._params, self._skipped, self._lr_scale = [*params], skipped, lr_scale
        with torch.no_grad():
            parts = [*map(local, self._params)]  # foreach takes no mix of DTensors
            for p, part in zip(self._params, parts, strict=True):
                copy = self._copies.get(p)
                if copy is None or copy.shape != part.shape or copy.dtype != part.dtype:
                    self._copies[p] = torch.empty_like(part)
            if parts:
                _copy([self._copies[p] for p in self._params], parts)

    @torch.no_grad()
    def after(self, *, undone: bool) -> Tensor | None:
        """Shortens the update if its norm stands out; None without a step before.

        `undone`: the step was undone after all. Returns the norm of the update as the optimizer
        made it: 0-d float32.
        """
        params, self._params = self._params, None
        if params is None:
            return None
        parts = [*map(local, params)]
        differences = [self._copies[p] for p in params]
        if params:
            _subtract(differences, parts)  # old - new, in place of the copy
        norm = self._all_reduce.norm_of(differences, params)
        skipped = True if undone else self._skipped
        scale = self._engine.clip_update(norm / self._lr_scale, skipped)
        if isinstance(scale, Tensor):
            for p, difference in zip(parts, differences, strict=True):
                factor = scale.to(p.device, non_blocking=True)
                # Selected, not added: an addition of zeros would make +0.0 of -0.0.
                p.copy_(torch.where(factor < 1, p + (1 - factor).to(p.dtype) * difference, p))
        elif scale < 1 and params:
            _add(parts, differences, alpha=1 - scale)
        return norm

    def clear(self) -> None:
        """Forgets a step that has raised."""
        self._params = None
