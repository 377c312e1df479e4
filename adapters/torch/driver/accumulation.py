"""Tracks the gradients since the last optimizer step, and drops them to repeat the step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from healcore.torch import gradients
from healcore.torch.attachment import Healing
from healcore.torch.driver.batch_statistics import BatchStatistics
from healcore.torch.live_state import RngState

_MOST, _DEPTH = 1000, 4
"""Maximum length and nesting of containers that are searched for tensors."""


class Accumulation:
    """Whether `.grad` holds gradients that an optimizer has not stepped with.

    Many loops clear gradients only before the next backward pass, so hooks record each backward
    pass and step. Losses count too, because some wrappers write `.grad` without autograd.

    Attributes:
        stepped: whether the optimizer has stepped; the reader resets it.
        steps: number of steps so far.
        idle: number of steps of other optimizers since this optimizer's last step.
        reached_since_any_step: whether a backward pass has run since the last step of any
            optimizer; the driver resets it.
    """

    def __init__(self, healing: Healing, after_step: Callable[[], object]) -> None:
        self.healing = healing
        self._call_after_step = after_step
        self._reached = self.stepped = self.reached_since_any_step = False
        self.steps = self.idle = 0
        self._watched: Tensor | None = None
        self._backward_handle: Any = None
        self._backward_hook: Any = torch.compiler.disable(self._on_backward)
        healing.healed_step.on_step = self._on_step
        self._watch()

    @property
    def in_progress(self) -> bool:
        """Whether there are gradients that the optimizer has not stepped with."""
        self._watch()
        if not (self._reached or self.healing.has_loss):
            return False
        return any(p.grad is not None for p in gradients.parameters(self.healing.optimizer))

    def drop_by_products(self) -> None:
        """Ignores gradients and losses that a step of another optimizer has left.

        `zero_grad` drops the gradients. The losses are dropped here, because a checkpoint has no
        losses: a restored run judges its next step without them.
        """
        self._reached = False
        self.healing.drop_losses()

    def clear(self) -> None:
        """Drops the gradients and all signals since the last step."""
        for p in gradients.parameters(self.healing.optimizer):
            p.grad = None
        self._reached = False
        self.healing.discard()

    def close(self) -> None:
        """Removes the hooks."""
        self.healing.healed_step.on_step = None
        if self._backward_handle is not None:
            self._backward_handle.remove()

    def _watch(self) -> None:
        """Moves the hook to a trained parameter if the watched parameter has been frozen."""
        if self._watched is not None and self._watched.requires_grad:
            return
        params = gradients.parameters(self.healing.optimizer)
        found = next((p for p in params if p.requires_grad and p.is_leaf), None)
        if found is None:
            return  # all parameters are frozen while another network trains
        if self._backward_handle is not None:
            self._backward_handle.remove()
        self._watched = found
        self._backward_handle = found.register_post_accumulate_grad_hook(self._backward_hook)

    def _on_backward(self, _: Tensor) -> None:
        self._reached = self.reached_since_any_step = True

    def _on_step(self) -> None:
        self._reached, self.stepped = False, True
        self.steps, self.idle = self.steps + 1, 0
        self._watch()
        self._call_after_step()


class GradientWindow:
    """Implements `healcore.runtime.faults.microbatches.Gradients`.

    A window is all parts since the last step. It starts without gradients, and `BatchStatistics`
    has already saved the statistics, so only the states of random generators are saved here. A
    repeated window gives bit for bit the result of a window that started with the smaller parts.

    Args:
        accumulations: the gradients of each optimizer.
        statistics: the batch statistics of the state.
        scaler: the GradScaler of the state, or None.
    """

    def __init__(
        self,
        accumulations: Sequence[Accumulation],
        statistics: Sequence[BatchStatistics],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._accumulations, self._statistics = accumulations, statistics
        self._scaler = scaler
        self._generators = RngState()
        self.begin_window()

    def accumulating(self) -> bool:
        """Whether any optimizer has gradients that it has not stepped with."""
        return any(accumulation.in_progress for accumulation in self._accumulations)

    def begin_window(self) -> None:
        """Saves the state at the start of a window."""
        self._begun = self._steps_and_records()
        self._random = self._generators.state_dict()
        self._node = torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]

    def has_stepped(self) -> bool:
        """Whether an optimizer has stepped, or a GradScaler has dropped its step."""
        steps, records = self._steps_and_records()
        return steps != self._begun[0] or records is not self._begun[1]

    def redo_window(self, held: list[Any], *, clear_cache: bool) -> None:
        """Drops gradients and observed losses; restores random states and batch statistics."""
        for accumulation in self._accumulations:
            accumulation.clear()
        for statistics in self._statistics:
            statistics.end(True)
        self._generators.load_state_dict(self._random)
        free_graphs(held, since=self._node)
        held.clear()
        gc.collect()  # an exception and its frames refer to each other
        if clear_cache and torch.accelerator.is_available():
            torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()

    def _steps_and_records(self) -> tuple[int, Any]:
        """Steps so far, and the GradScaler's records.

        A GradScaler's update() replaces the records, even if it has called no optimizer.
        """
        records = getattr(self._scaler, "_per_optimizer_states", None)
        return sum(accumulation.steps for accumulation in self._accumulations), records


def free_graphs(values: Iterable[Any], *, since: int) -> None:
    """Frees the graphs of these tensors, whose backward pass does not run.

    A variable of the loop (`loss`) keeps its graph, and so the activations, until the loop assigns
    it again after the next forward pass.

    Args:
        values: tensors, containers of tensors, or other objects, which are ignored.
        since: lowest sequence number of the graph nodes to free.
    """
    for tensor in _tensors(values, _DEPTH):
        if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
            with suppress(RuntimeError):  # a view
                tensor.detach_()


def _tensors(values: Iterable[Any], depth: int) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif depth and isinstance(value, (Mapping, list, tuple)) and len(value) <= _MOST:
            inner = value.values() if isinstance(value, Mapping) else value
            yield from _tensors(list(inner), depth - 1)
