"""The live state of a run: checks of the user's state, names of its parts, random states.

Without the checks a missing part would stay unnoticed until the first rollback, which would combine
old moments with new weights.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from healcore.core.errors import AttachError
from healcore.runtime.driver import json_setting
from healcore.torch import gradients
from healcore.torch.attachment import Healing, scaler_of, unwrapped

_COUNTED = {"last_epoch", "base_lrs"}
_NO_HYPERPARAMETERS = {
    *("params", "param_names", "initial_lr"),
    *("foreach", "fused", "capturable", "differentiable"),
}
"""Entries of a parameter group that do not affect training."""

_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
"""Parts that torch.compile, activation checkpointing and FSDP1 add to a parameter's path."""

_EXAMPLE = 'state={"model": model, "optimizer": optimizer, "scheduler": scheduler}'


def checked_state(state: Any) -> dict[str, Any]:
    """Copies the mapping, without environments that have no state.

    Raises AttachError unless the state can be healed and restored in place.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise AttachError(
            f"the state maps names to what is saved, got {type(state).__name__}: {_EXAMPLE}"
        )
    state = {name: value for name, value in state.items() if not is_stateless_environment(value)}
    for name, value in state.items():
        _check_item(name, value)
    found = optimizers(state)
    if not found:
        items = ", ".join(f"{name}: {type(value).__name__}" for name, value in state.items())
        raise AttachError(f"the state has no torch.optim.Optimizer ({items}): {_EXAMPLE}")
    names: dict[int, str] = {}
    for name, optimizer in found.items():
        other = names.setdefault(id(optimizer), name)
        if other != name:
            raise AttachError(f'"{other}" and "{name}" are the same optimizer: leave one out')
        _check_complete(name, optimizer, state)
    return state


def is_stateless_environment(value: Any) -> bool:
    """Whether a value is an environment of reinforcement learning that cannot be saved.

    Environments as in gymnasium have `reset()` and `step(action)`, and rarely a `state_dict`. A
    scheduler without a `state_dict` is no environment: its `step` needs no argument.
    """
    if isinstance(value, Tensor | dict | list) or hasattr(value, "state_dict"):
        return False
    if not all(callable(getattr(value, name, None)) for name in ("reset", "step")):
        return False
    try:
        given = inspect.signature(value.step).parameters.values()
    except (TypeError, ValueError):  # written in C
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(each.kind in positional and each.default is each.empty for each in given)


def scaler(state: Mapping[str, Any]) -> torch.amp.GradScaler | None:
    """The only GradScaler in the state or in accelerate's wrappers, or None if not exactly one."""
    found = saved_scalers(state)
    found += [s for v in state.values() if isinstance(v, Optimizer) and (s := scaler_of(v))]
    return found[0] if len({*map(id, found)}) == 1 else None


def saved_scalers(state: Mapping[str, Any]) -> list[torch.amp.GradScaler]:
    """The GradScalers that are values of the state, or attributes of its other objects."""
    objects = [v for v in state.values() if _is_opaque(v) and hasattr(v, "__dict__")]
    owned = [each for v in objects for each in vars(v).values()]
    return [v for v in (*state.values(), *owned) if isinstance(v, torch.amp.GradScaler)]


def hyperparameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """The classes of optimizers and schedulers, then their hyperparameters as JSON values.

    For example `optimizer` -> "AdamW" and `optimizer.lr` -> 0.001. `lr` is the rate from which a
    scheduler starts. If groups differ, the value is a list.
    """
    found: dict[str, Any] = dict(class_names(state))
    for name, optimizer in optimizers(state).items():
        groups = optimizer.param_groups
        for key in dict.fromkeys(key for group in groups for key in group):
            if key in _NO_HYPERPARAMETERS:
                continue
            source = "initial_lr" if key == "lr" else key
            given = [group.get(source, group.get(key)) for group in groups]
            single = (v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in given)
            values = [*map(json_setting, single)]
            if None not in values:
                same = all(value == values[0] for value in values)
                found[f"{name}.{key}"] = values[0] if same else values
    for name, value in state.items():
        if is_scheduler(value):
            for key, each in getattr(value, "scheduler", value).state_dict().items():
                # Excludes counters, and rates that the optimizer also has.
                setting = None if key[0] == "_" or key in _COUNTED else json_setting(each)
                if setting is not None:
                    found[f"{name}.{key}"] = setting
    return found


def identities(state: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Name -> part -> class or position, which must be equal when the state is restored.

    An optimizer's `load_state_dict` assigns moments by the parameter's number, and checks neither
    the parameter nor the class. A scheduler's `load_state_dict` overwrites every attribute.
    """
    found = {name: {name: kind} for name, kind in class_names(state).items()}
    for name, optimizer in optimizers(state).items():
        names = iter(parameter_names(state, gradients.parameters(optimizer)))
        found[name] |= {
            f"{name}[{next(names)}]": f"parameter {i} of group {g}"
            for g, group in enumerate(optimizer.param_groups)
            for i, _ in enumerate(group["params"])
        }
    return found


def class_names(state: Mapping[str, Any]) -> dict[str, str]:
    """The class of each optimizer and scheduler, by name, without accelerate's wrapper."""
    schedulers = {n: getattr(v, "scheduler", v) for n, v in state.items() if is_scheduler(v)}
    return {n: type(v).__qualname__ for n, v in {**optimizers(state), **schedulers}.items()}


def optimizers(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    """The optimizers by name, without accelerate's wrapper."""
    return {name: unwrapped(v) for name, v in state.items() if isinstance(v, Optimizer)}


def parameter_names(state: Mapping[str, Any], params: Sequence[object]) -> list[str]:
    """Names of parameters: the path in a module, or the position in the optimizer. Slow."""
    known: dict[int, str] = {}
    for name, optimizer in optimizers(state).items():
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                known[id(p)] = f"{name}.param_groups[{g}]['params'][{i}]"
    modules = {n: state[n] for n in reversed([*state]) if isinstance(state[n], nn.Module)}
    trained = {n: [id(p) in known for p in m.parameters()] for n, m in modules.items()}
    # Modules may share a parameter, for example a model and its average. The name is of the module
    # with the most trained parameters, then of the smallest, then of the first in the state.
    for name in sorted(modules, key=lambda n: (sum(trained[n]), -len(trained[n]))):
        prefix = f"{name}." if len(modules) > 1 else ""
        module = modules[name]
        for path, p in module.named_parameters():
            known[id(p)] = prefix + _WRAPPERS.sub("", path)
    return [known.get(id(p), "(no longer in the state)") for p in params]


def is_scheduler(value: Any) -> bool:
    """Whether `value` is a learning-rate scheduler, or accelerate's wrapper of a scheduler."""
    return isinstance(value, LRScheduler) or isinstance(
        getattr(value, "scheduler", None), LRScheduler
    )


def _check_item(name: str, value: Any) -> None:
    """Raises AttachError unless `store.apply` can restore the value in place."""
    problem = ""
    methods = ("state_dict", "load_state_dict")
    if isinstance(value, Healing):
        problem = (
            "a handle of attach(): leave it out, its engine is saved with the state, and the "
            "handle is found through its optimizer"
        )
    elif not (isinstance(value, Tensor | dict | list) or all(hasattr(value, m) for m in methods)):
        problem = (
            f"of type {type(value).__name__}, which a rollback cannot restore in place: the state "
            "may hold tensors, dictionaries, lists, and objects with state_dict() and "
            f'load_state_dict(); hold other values in a dictionary, state={{"{name}": {{...}}}}'
        )
    elif isinstance(value, nn.Module) and any(
        map(is_lazy, [*value.parameters(), *value.buffers()])
    ):
        problem = (
            "a module with lazy parts without shapes, which no checkpoint can hold: call it on one "
            "batch before the Healer, as in model(next(iter(loader)))"
        )
    if problem:
        raise AttachError(f'state["{name}"] is {problem}')


def _check_complete(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    if hasattr(state[name], "attach_with") or any(map(_is_opaque, state.values())):
        return  # a trainer's optimizer, or an opaque value, may hold the parameters
    present = {id(p) for value in state.values() for p in tensors_in(value)}
    params = gradients.parameters(optimizer)
    missing = sum(id(p) not in present for p in params)
    if missing:
        raise AttachError(
            f'{missing} of the {len(params)} parameters of "{name}" are not in the state: a '
            "rollback would combine old moments with new weights; add their module, as in "
            f"{_EXAMPLE}"
        )
    lost = []
    scales = scaler_of(state[name])
    scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    if scheduled and not any(is_scheduler(value) for value in state.values()):
        lost.append(("a learning-rate scheduler", _EXAMPLE))
    if scales is not None and not any(each is scales for each in saved_scalers(state)):
        lost.append(("a GradScaler", 'state={..., "scaler": accelerator.scaler}'))
    for what, example in lost:
        warnings.warn(
            f'{what} drives "{name}" but is not in the state: a rollback would not restore it; '
            f"add it, as in {example}",
            UserWarning,
            stacklevel=4,
        )


def _is_opaque(value: Any) -> bool:
    """Whether a value may hold parameters that healcore cannot see: a trainer, an EMA."""
    known = (nn.Module, Optimizer, torch.amp.GradScaler)
    return hasattr(value, "state_dict") and not (isinstance(value, known) or is_scheduler(value))


def tensors_in(value: Any, most: float = math.inf, depth: float = math.inf) -> Iterator[Tensor]:
    """The tensors in nested containers, and the parameters of modules in them.

    Ignores containers of more than `most` items, and containers nested `depth` times.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping | list | tuple) and depth and len(value) <= most:
        for part in [*(value.values() if isinstance(value, Mapping) else value)]:
            yield from tensors_in(part, most, depth - 1)
