"""The live state of a run: checks of the user's state, names of its parts, random states.

Without the checks a missing part would stay unnoticed until the first rollback, which would combine
old moments with new weights.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from healcore.console import stacklevel_of_program
from healcore.core.errors import AttachError
from healcore.runtime.driver import json_setting
from healcore.torch import gradients
from healcore.torch.attachment import Healing, unwrapped
from healcore.torch.gradients import ParamGroup

State: TypeAlias = Mapping[str, Any]
"""What the user passes to the Healer: name -> module, optimizer, scheduler, tensors, or any object
with `state_dict` and `load_state_dict`."""

_COUNTED = {"last_epoch", "base_lrs"}
_NO_HYPERPARAMETERS = {
    "params",
    "param_names",
    "initial_lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
}
"""Entries of a parameter group that do not affect training."""

_WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
"""Parts that torch.compile, activation checkpointing and FSDP1 add to a parameter's path."""

_EXAMPLE = (
    'state={"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}'
)


def checked_state(state: Any) -> dict[str, Any]:
    """Checks that a state can be healed, and restored in place.

    Args:
        state: what the user passes to the Healer: name -> module, optimizer, scheduler, ...

    Returns:
        A copy of the mapping.

    Raises:
        AttachError: the state is no mapping, has no optimizer or the same optimizer twice, lacks
            parameters of an optimizer, or has a value that cannot be restored in place.
    """
    if not isinstance(state, Mapping):
        raise AttachError(
            f"the state maps names to what is saved, got {type(state).__name__}: {_EXAMPLE}"
        )
    state = dict(state)
    for name, value in state.items():
        _check_item(name, value)
    healed = optimizers(state)
    if not healed:
        items = ", ".join(f"{name}: {type(value).__name__}" for name, value in state.items())
        raise AttachError(f"the state has no torch.optim.Optimizer ({items}): {_EXAMPLE}")
    names: dict[int, str] = {}
    for name, optimizer in healed.items():
        other = names.setdefault(id(optimizer), name)
        if other != name:
            raise AttachError(f'"{other}" and "{name}" are the same optimizer: leave one out')
        _check_complete(name, optimizer, state)
    return state


def scaler(state: State) -> torch.amp.GradScaler | None:
    """The GradScaler of the loop, if the state shows which GradScaler the loop uses.

    Args:
        state: the state of the run.

    Returns:
        The only GradScaler in the state or in accelerate's wrappers, or None without a GradScaler
        and with several GradScalers.
    """
    found = {each for value in state.values() for each in _scalers_in(value)}
    if len(found) == 1:
        return found.pop()
    return None


def _scalers_in(value: Any) -> list[torch.amp.GradScaler]:
    """A value that is a GradScaler, and the GradScalers that it holds, as a trainer does."""
    candidates = [value, *getattr(value, "__dict__", {}).values()]
    return [each for each in candidates if isinstance(each, torch.amp.GradScaler)]


def hyperparameters(state: State) -> dict[str, Any]:
    """The classes of optimizers and schedulers, then their hyperparameters as JSON values.

    The next start of the run compares them, and reports what the program has changed.

    Args:
        state: the state of the run.

    Returns:
        Name -> value, for example `optimizer` -> "AdamW" and `optimizer.lr` -> 0.001. `lr` is the
        rate from which a scheduler starts. If groups differ, the value is a list.
    """
    settings: dict[str, Any] = dict(_class_names(state))
    for name, optimizer in optimizers(state).items():
        for key in optimizer.param_groups[0]:
            values = [_group_setting(group, key) for group in optimizer.param_groups]
            if key in _NO_HYPERPARAMETERS or None in values:
                continue
            if values.count(values[0]) == len(values):
                values = values[0]
            settings[f"{name}.{key}"] = values
    for name, scheduler in _schedulers(state).items():
        for key, entry in scheduler.state_dict().items():
            if key[0] != "_" and key not in _COUNTED:
                settings[f"{name}.{key}"] = json_setting(entry)
    return {key: value for key, value in settings.items() if value is not None}


def _group_setting(group: ParamGroup, key: str) -> Any:
    """A hyperparameter of one parameter group as a JSON value, or None."""
    value = group.get(key)
    if key == "lr":
        value = group.get("initial_lr", value)
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return json_setting(value)


def identities(state: State) -> dict[str, dict[str, str]]:
    """Lists what must be equal when a state is restored. torch does not check these facts.

    An optimizer's `load_state_dict` assigns moments by the parameter's number, and checks neither
    the parameter nor the class. A scheduler's `load_state_dict` overwrites every attribute.

    Args:
        state: the state of the run.

    Returns:
        Name -> part -> class or position, for example `optimizer` -> `optimizer[0.weight]` ->
        "parameter 0 of group 0".
    """
    found: dict[str, dict[str, str]] = {}
    for name, class_name in _class_names(state).items():
        found[name] = {name: class_name}
    for name, optimizer in optimizers(state).items():
        paths = iter(parameter_names(state, gradients.parameters(optimizer)))
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                place = f"parameter {i} of group {g} {tuple(p.shape)}"
                found[name][f"{name}[{next(paths)}]"] = place
    return found


def _class_names(state: State) -> dict[str, str]:
    """The class of each optimizer, then of each scheduler, by name."""
    inner = optimizers(state) | _schedulers(state)
    return {name: type(value).__qualname__ for name, value in inner.items()}


def optimizers(state: State) -> dict[str, Optimizer]:
    """The optimizers of a state by name, without accelerate's wrapper."""
    return {name: unwrapped(v) for name, v in state.items() if isinstance(v, Optimizer)}


def modules(state: State) -> dict[str, nn.Module]:
    """The modules of a state and their submodules, parents first.

    Returns:
        Path, such as "model.layers.0" -> module.
    """
    found: dict[str, nn.Module] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            found.update(value.named_modules(prefix=name))
    return found


def _schedulers(state: State) -> dict[str, Any]:
    """The learning-rate schedulers of a state by name, without accelerate's wrapper."""
    inner = {name: getattr(value, "scheduler", value) for name, value in state.items()}
    return {name: value for name, value in inner.items() if isinstance(value, LRScheduler)}


def parameter_names(state: State, params: Sequence[object]) -> list[str]:
    """Names of parameters, for messages and records. Slow: visits every parameter of the state.

    Args:
        state: the state of the run.
        params: parameters to name.

    Returns:
        For each its path in a module, such as "layers.0.weight", with the module's name first if
        the state has several modules. Its position in the optimizer if no module has it.
    """
    known: dict[int, str] = {}
    for name, optimizer in optimizers(state).items():
        for number, p in enumerate(gradients.parameters(optimizer)):
            known[id(p)] = f"{name}.{number}"
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    # Modules may share a parameter. The first one comes last here, and names it.
    for name, module in reversed(modules.items()):
        prefix = ""
        if len(modules) > 1:
            prefix = f"{name}."
        for path, p in module.named_parameters():
            known[id(p)] = prefix + _WRAPPERS.sub("", path)
    return [known.get(id(p), "(no longer in the state)") for p in params]


def _check_item(name: str, value: Any) -> None:
    """Raises AttachError unless `store.apply` can restore the value in place."""
    if isinstance(value, Healing):
        raise AttachError(
            f'state["{name}"] is a handle of attach(): leave it out, its engine is saved with the '
            "state, and the handle is found through its optimizer"
        )
    is_container = isinstance(value, Tensor | dict | list) or kind_of(value)
    if not is_container and not (
        hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    ):
        raise AttachError(
            f'state["{name}"] is of type {type(value).__name__}, which a rollback cannot restore '
            "in place: the state may hold tensors, dictionaries, lists, random generators, and "
            "objects with state_dict() and load_state_dict(); hold numbers and texts in a "
            f'dictionary, state={{"{name}": {{...}}}}, and give any other object these two methods'
        )


def _check_complete(name: str, optimizer: Optimizer, state: State) -> None:
    """Raises AttachError if parameters are missing; warns of a missing scheduler or GradScaler."""
    # A trainer's optimizer, or an opaque value, may hold the parameters.
    if hasattr(state[name], "attach_with") or any(_is_opaque(value) for value in state.values()):
        return
    present = {id(tensor) for tensor in tensors_in([*state.values()])}
    params = gradients.parameters(optimizer)
    missing = sum(id(p) not in present for p in params)
    if missing:
        raise AttachError(
            f'{missing} of the {len(params)} parameters of "{name}" are not in the state: a '
            "rollback would combine old moments with new weights; add their module, as in "
            f"{_EXAMPLE}"
        )
    lost: list[str] = []
    if getattr(optimizer.step, "_wrapped_by_lr_sched", False) and not _schedulers(state):
        lost.append("a learning-rate scheduler")
    saved = {name: value for name, value in state.items() if not isinstance(value, Optimizer)}
    if _scalers_in(state[name]) and scaler(saved) is None:
        lost.append("a GradScaler")
    for missing_part in lost:
        warnings.warn(
            f'{missing_part} drives "{name}" but is not in the state: a rollback would not restore '
            f"it; add it, as in {_EXAMPLE}",
            UserWarning,
            stacklevel=stacklevel_of_program(),
        )


def _is_opaque(value: Any) -> bool:
    """Whether a value may hold parameters that healcore cannot see: a trainer, an EMA."""
    known = isinstance(value, nn.Module | Optimizer | torch.amp.GradScaler)
    return hasattr(value, "state_dict") and not known and not _schedulers({"": value})


def tensors_in(
    value: Any, max_items: float = math.inf, max_depth: float = math.inf
) -> Iterator[Tensor]:
    """Yields the tensors in nested containers, and the parameters of modules in them.

    Args:
        value: a tensor, a module, a mapping, a list or a tuple. Any other object has no tensors.
        max_items: containers with more items are ignored.
        max_depth: containers that are nested more deeply are ignored.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping | list | tuple) and max_depth and len(value) <= max_items:
        parts: Iterable[Any] = value
        if isinstance(value, Mapping):
            parts = value.values()
        for part in [*parts]:  # a copy, because the consumer may change the container
            yield from tensors_in(part, max_items, max_depth - 1)


class GeneratorState(NamedTuple):
    """The state of a random generator of the program, for generators of the same kind.

    It is saved by value, and restored in place: the loop, a sampler and an augmentation may hold
    the same generator. The global generators are in `DataState`, not in the state of a program.
    """

    kind: str
    """See `kind_of`."""
    state: Any
    """See `random_states.generator_state`."""


def kind_of(value: Any) -> str:
    """The kind of a generator, with the name of its algorithm or the type of its device.

    Args:
        value: any value.

    Returns:
        For example "torch cpu" or "Generator PCG64". A state fits every generator of the same kind.
        Empty for another value, also for a subclass, which may have a state of its own.
    """
    if type(value) is torch.Generator:
        return f"torch {value.device.type}"
    if type(value) in (np.random.Generator, np.random.RandomState):
        return f"{type(value).__name__} {type(value._bit_generator).__name__}"
    if type(value) is random.Random:
        return "python"
    return ""
