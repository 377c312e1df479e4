"""`ClipOrder`: the norm of all gradients, summed in the order in which a program clips them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from healcore.torch import gradients


class ClipOrder:
    """The order in which `torch.nn.utils.clip_grad_norm_` sums the gradients of a program.

    A fixed clip of a policy replaces the program's own clip, and has to give the same bits. A
    program clips `model.parameters()`, and the last bits of a sum depend on its order. An optimizer
    with several parameter groups has another order than the model.
    """

    def __init__(self) -> None:
        self._modules: Sequence[nn.Module] = ()
        self._positions: list[int] = []
        """Positions of the optimizer's parameters in the order of `_modules`."""
        self._is_reordered = False
        """Whether this order is not the order of the optimizer."""

    def use_modules(self, modules: Sequence[nn.Module]) -> None:
        """Sums in the order of the modules' parameters from now on.

        Args:
            modules: the modules of the run. Parameters that are in none of them come last.
        """
        self._modules = modules
        self._positions = []

    def norms(
        self, parameters: Sequence[Tensor], grads: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor] | None, Tensor] | None:
        """`gradients.norms_of_clip`, summed in the modules' order.

        Args:
            parameters: all parameters of the optimizer.
            grads: their gradients, without None.

        Returns:
            As `gradients.norms_of_clip`. The norms of each gradient are in the optimizer's order.
        """
        if len(self._positions) != len(parameters):
            self._find_positions(parameters)
        if not self._is_reordered:
            return gradients.norms_of_clip(grads)
        present: list[int] = []
        reordered: list[Tensor] = []
        for i in self._positions:
            grad = parameters[i].grad
            if grad is not None:
                present.append(i)
                reordered.append(grad)
        measured = gradients.norms_of_clip(reordered)
        if measured is None:
            return None
        norms, total = measured
        if norms is None:
            return None, total
        norm_at = dict(zip(present, norms, strict=True))
        return [norm_at[i] for i in sorted(present)], total

    def _find_positions(self, parameters: Sequence[Tensor]) -> None:
        """Sets `_positions` and `_is_reordered`."""
        places: dict[int, int] = {}
        visited = 0
        for module in self._modules:
            for p in module.parameters():
                places[id(p)] = visited  # a module that comes later decides for a shared parameter
                visited += 1
        outside = len(places)
        # The sort is stable, so parameters outside of the modules keep the optimizer's order.
        positions = range(len(parameters))
        self._positions = sorted(positions, key=lambda i: places.get(id(parameters[i]), outside))
        self._is_reordered = self._positions != [*positions]
