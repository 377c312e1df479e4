"""The live state of a run: checks of the user's state, names of its parts, random states.

Without the checks a missing part would stay unnoticed until the first rollback, which would combine
old moments with new weights.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from healcore.console import stacklevel_of_program
from healcore.core.errors import AttachError
from healcore.runtime.program_settings import json_setting
from healcore.torch import gradients
from healcore.torch.attachment import Healing, scaler_of, unwrapped
from healcore.torch.generators import kind_of
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

_EXAMPLE = 'state={"model": model, "optimizer": optimizer, "scheduler": scheduler}'


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
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
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
    scalers = [*_saved_scalers(state), *map(scaler_of, state.values())]
    known = {id(each): each for each in scalers if each is not None}
    if len(known) != 1:
        return None
    return known.popitem()[1]


def _saved_scalers(state: State) -> list[torch.amp.GradScaler]:
    """The GradScalers that a checkpoint saves: values of the state, and what its objects hold."""
    candidates: list[Any] = [*state.values()]
    for value in state.values():
        if _is_opaque(value) and hasattr(value, "__dict__"):
            candidates += vars(value).values()
    return [value for value in candidates if isinstance(value, torch.amp.GradScaler)]


def hyperparameters(state: State) -> dict[str, Any]:
    """The classes of optimizers and schedulers, then their hyperparameters as JSON values.

    The next start of the run compares them, and reports what the program has changed.

    Args:
        state: the state of the run.

    Returns:
        Name -> value, for example `optimizer` -> "AdamW" and `optimizer.lr` -> 0.001. `lr` is the
        rate from which a scheduler starts. If groups differ, the value is a list.
    """
    settings: dict[str, Any] = dict(class_names(state))
    for name, optimizer in optimizers(state).items():
        groups = optimizer.param_groups
        # The keys of all groups, each once and in order.
        keys = dict.fromkeys(key for group in groups for key in group)
        for key in keys:
            values = [_group_setting(group, key) for group in groups]
            if key in _NO_HYPERPARAMETERS or None in values:
                continue
            if values.count(values[0]) == len(values):
                values = values[0]
            settings[f"{name}.{key}"] = values
    for name, value in state.items():
        if is_scheduler(value):
            for key, entry in getattr(value, "scheduler", value).state_dict().items():
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
    for name, class_name in class_names(state).items():
        found[name] = {name: class_name}
    for name, optimizer in optimizers(state).items():
        names = iter(parameter_names(state, gradients.parameters(optimizer)))
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                place = f"parameter {i} of group {g} {tuple(p.shape)}"
                found[name][f"{name}[{next(names)}]"] = place
    return found


def class_names(state: State) -> dict[str, str]:
    """The class of each optimizer and scheduler, without accelerate's wrapper.

    Args:
        state: the state of the run.

    Returns:
        Name -> name of the class: first the optimizers, then the schedulers.
    """
    inner: dict[str, Any] = dict(optimizers(state))
    for name, value in state.items():
        if is_scheduler(value):
            inner[name] = getattr(value, "scheduler", value)
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
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                known[id(p)] = f"{name}.param_groups[{g}]['params'][{i}]"
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    # Modules may share a parameter. The first one comes last here, and names it.
    for name, module in reversed(modules.items()):
        prefix = ""
        if len(modules) > 1:
            prefix = f"{name}."
        for path, p in module.named_parameters():
            known[id(p)] = prefix + _WRAPPERS.sub("", path)
    return [known.get(id(p), "(no longer in the state)") for p in params]


def is_scheduler(value: Any) -> bool:
    """Whether `value` is a learning-rate scheduler, or accelerate's wrapper of a scheduler."""
    inner = getattr(value, "scheduler", None)
    return isinstance(value, LRScheduler) or isinstance(inner, LRScheduler)


def _check_item(name: str, value: Any) -> None:
    """Raises AttachError unless `store.apply` can restore the value in place."""
    obstacle = ""
    is_container = isinstance(value, Tensor | dict | list) or bool(kind_of(value))
    has_methods = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    if isinstance(value, Healing):
        obstacle = (
            "a handle of attach(): leave it out, its engine is saved with the state, and the "
            "handle is found through its optimizer"
        )
    elif not (is_container or has_methods):
        obstacle = (
            f"of type {type(value).__name__}, which a rollback cannot restore in place: the state "
            "may hold tensors, dictionaries, lists, random generators, and objects with "
            "state_dict() and load_state_dict(); hold numbers and texts in a dictionary, "
            f'state={{"{name}": {{...}}}}, and give any other object these two methods'
        )
    if obstacle:
        raise AttachError(f'state["{name}"] is {obstacle}')


def _check_complete(name: str, optimizer: Optimizer, state: State) -> None:
    """Raises AttachError if parameters are missing; warns of a missing scheduler or GradScaler."""
    # A trainer's optimizer, or an opaque value, may hold the parameters.
    if hasattr(state[name], "attach_with") or any(_is_opaque(value) for value in state.values()):
        return
    present: set[int] = set()
    for value in state.values():
        present.update(id(tensor) for tensor in tensors_in(value))
    params = gradients.parameters(optimizer)
    missing = sum(id(p) not in present for p in params)
    if missing:
        raise AttachError(
            f'{missing} of the {len(params)} parameters of "{name}" are not in the state: a '
            "rollback would combine old moments with new weights; add their module, as in "
            f"{_EXAMPLE}"
        )
    # What the state lacks, each with an example of a state that has it.
    lost: list[tuple[str, str]] = []
    is_scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    if is_scheduled and not any(is_scheduler(value) for value in state.values()):
        lost.append(("a learning-rate scheduler", _EXAMPLE))
    own_scaler = scaler_of(state[name])
    if own_scaler is not None and not any(each is own_scaler for each in _saved_scalers(state)):
        lost.append(("a GradScaler", 'state={..., "scaler": accelerator.scaler}'))
    for missing_part, example in lost:
        warnings.warn(
            f'{missing_part} drives "{name}" but is not in the state: a rollback would not restore '
            f"it; add it, as in {example}",
            UserWarning,
            stacklevel=stacklevel_of_program(),
        )


def _is_opaque(value: Any) -> bool:
    """Whether a value may hold parameters that healcore cannot see: a trainer, an EMA."""
    if isinstance(value, nn.Module | Optimizer | torch.amp.GradScaler) or is_scheduler(value):
        return False
    return hasattr(value, "state_dict")


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
