"""The state that a user hands over: what is in it, what it lacks, and what its tensors are called.

What is missing is not noticed before the first rollback, which then puts old moments beside new
weights; so it is looked for at the start.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from healcore.torch import gradients
from healcore.torch.attaching import unwrapped
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing

_EXAMPLE = 'state={"model": model, "optimizer": optimizer, "scheduler": scheduler}'


def checked(state: Any) -> dict[str, Any]:
    """A copy of the mapping, if it is one that can be healed.

    Raises:
        AttachError: it is no mapping of names, has no optimizer, the same one twice, a handle of
            healcore's own, something that cannot be put back in place, or an optimizer whose
            parameters are not in it.
    """
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise AttachError(
            f"the state maps names to what is saved, got {type(state).__name__}: {_EXAMPLE}"
        )
    for name, value in state.items():
        if isinstance(value, Healing):
            raise AttachError(
                f'state["{name}"] is a handle of attach(): leave it out, engines are saved beside '
                "the state; the handle is found at its optimizer and used"
            )
        _check_that_it_can_be_put_back(name, value)
    found = optimizers(state)
    if not found:
        there = ", ".join(f"{name}: {type(value).__name__}" for name, value in state.items())
        raise AttachError(f"the state has no torch.optim.Optimizer ({there}): {_EXAMPLE}")
    names = list(found)
    for i, name in enumerate(names):
        for other in names[:i]:
            if found[name] is found[other]:
                raise AttachError(f'"{other}" and "{name}" are the same optimizer: leave one out')
    for name, optimizer in found.items():
        _look_for_what_is_missing(name, optimizer, state)
    return dict(state)


def optimizers(state: Mapping[str, Any]) -> dict[str, Optimizer]:
    """The optimizers by name, without accelerate's wrapper."""
    return {name: unwrapped(v) for name, v in state.items() if isinstance(v, Optimizer)}


def modules(value: Any) -> Iterator[nn.Module]:
    """The modules of one value of the state, those within them included."""
    if isinstance(value, nn.Module):
        yield from value.modules()


def scaler(state: Mapping[str, Any]) -> torch.amp.GradScaler | None:
    """The GradScaler, if there is exactly one."""
    found = [value for value in state.values() if isinstance(value, torch.amp.GradScaler)]
    return found[0] if len(found) == 1 else None


class Names:
    """What parameters are called: as in their module, or by their place in the optimizer.

    Args:
        state: the live state.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def __call__(self, params: Sequence[object]) -> list[str]:
        """Names, in order. Walks over all modules: for steps with evidence only."""
        if not params:
            return []
        known: dict[int, str] = {}
        for name, optimizer in optimizers(self._state).items():
            for g, group in enumerate(optimizer.param_groups):
                for i, p in enumerate(group["params"]):
                    known[id(p)] = f"{name}.param_groups[{g}]['params'][{i}]"
        modules = {n: m for n, m in self._state.items() if isinstance(m, nn.Module)}
        for name, module in modules.items():
            prefix = f"{name}." if len(modules) > 1 else ""
            for path, p in module.named_parameters():
                # torch.compile's wrapper adds a level that nobody has written.
                known[id(p)] = prefix + path.replace("_orig_mod.", "")
        return [known.get(id(p), "(not in the state any more)") for p in params]


def _check_that_it_can_be_put_back(name: str, value: Any) -> None:
    """What `store.apply` changes in place; a number in the mapping is a copy of the loop's."""
    if isinstance(value, (Tensor, dict, list)):
        return
    there = [hasattr(value, method) for method in ("state_dict", "load_state_dict")]
    if all(there):
        return
    kind = type(value).__name__
    hint = f'hold it in a dictionary that the loop reads and writes, state={{"{name}": {{...}}}}'
    if any(there):
        hint = f"give {kind} {'load_state_dict(state)' if there[0] else 'state_dict()'} too"
    elif isinstance(value, tuple):
        hint = "make it a list"
    raise AttachError(
        f'state["{name}"] is of type {kind}, which a rollback cannot put back in place: {hint}; '
        "the state holds tensors, dictionaries and lists of them, and objects with state_dict() "
        "and load_state_dict()"
    )


def _look_for_what_is_missing(name: str, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    if any(_is_opaque(value) for value in state.values()):
        return  # it may be in there
    there = {id(p) for value in state.values() for p in _tensors(value)}
    params = gradients.parameters(optimizer)
    missing = sum(id(p) not in there for p in params)
    if missing:
        raise AttachError(
            f'{missing} of the {len(params)} parameters of "{name}" are nowhere in the state: a '
            f"rollback would put old moments beside new weights; add their module, as in {_EXAMPLE}"
        )
    scheduled = getattr(optimizer.step, "_wrapped_by_lr_sched", False)
    if scheduled and not any(_is_scheduler(value) for value in state.values()):
        warnings.warn(
            f'a learning-rate scheduler drives "{name}" and none is in the state: after a rollback '
            f"it would go on from where it was; add it, as in {_EXAMPLE}",
            UserWarning,
            stacklevel=4,
        )


def _is_scheduler(value: Any) -> bool:
    return isinstance(value, LRScheduler)


def _is_opaque(value: Any) -> bool:
    """Whether it has a state of its own that cannot be looked into: a trainer, an EMA."""
    known = (nn.Module, Optimizer, LRScheduler, torch.amp.GradScaler)
    return hasattr(value, "state_dict") and not isinstance(value, known)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
