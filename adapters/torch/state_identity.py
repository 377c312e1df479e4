"""The classes of optimizers and schedulers in a state, and the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from healcore.torch import gradients
from healcore.torch.attachment import unwrapped

_LEVELS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Levels that torch.compile, activation checkpointing and FSDP1 add to the path of a parameter."""


def identities(state: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What has to be the same when the state is restored: name -> part -> class or place.

    `load_state_dict` of an optimizer takes moments by the number of their parameter, whatever
    parameter that is now, and of any class. A scheduler takes over every attribute.
    """
    found = {name: {name: kind} for name, kind in classes(state).items()}
    for name, optimizer in optimizers(state).items():
        names = iter(parameter_names(state, gradients.parameters(optimizer)))
        found[name] |= {
            f"{name}[{next(names)}]": f"parameter {i} of group {g}"
            for g, group in enumerate(optimizer.param_groups)
            for i, _ in enumerate(group["params"])
        }
    return found


def classes(state: Mapping[str, Any]) -> dict[str, str]:
    """The class of each optimizer and scheduler, by name, without accelerate's wrapper."""
    schedulers = {n: getattr(v, "scheduler", v) for n, v in state.items() if is_scheduler(v)}
    return {n: type(v).__qualname__ for n, v in {**optimizers(state), **schedulers}.items()}


def optimizers(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    """The optimizers by name, without accelerate's wrapper."""
    return {name: unwrapped(v) for name, v in state.items() if isinstance(v, Optimizer)}


def parameter_names(state: Mapping[str, Any], params: Sequence[object]) -> list[str]:
    """Names of parameters: as in their module, or by position in the optimizer. Slow."""
    known: dict[int, str] = {}
    for name, optimizer in optimizers(state).items():
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                known[id(p)] = f"{name}.param_groups[{g}]['params'][{i}]"
    modules = {n: m for n, m in state.items() if isinstance(m, nn.Module)}
    for name, module in modules.items():
        prefix = f"{name}." if len(modules) > 1 else ""
        for path, p in module.named_parameters():
            for level in _LEVELS:
                path = path.replace(level, "")
            known[id(p)] = prefix + path
    return [known.get(id(p), "(not in the state any more)") for p in params]


def is_scheduler(value: Any) -> bool:
    """Whether it is a learning-rate scheduler, or accelerate's wrapper of one."""
    return isinstance(value, LRScheduler) or isinstance(
        getattr(value, "scheduler", None), LRScheduler
    )
