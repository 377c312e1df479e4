"""Why a loader cannot be put back, and what to pass instead. Classes are known by name only."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

# Each of these draws a new order with every pass and keeps no record of it; torchdata then only
# counts forward through another order, without a word.
_UNRECORDED = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
# torchdata's own record theirs in a StatefulDataLoader, but not among its nodes (0.11).
_UNRECORDED_IN_NODES = (*_UNRECORDED, "StatefulDistributedSampler")


def why_not(loader: Any) -> str:
    """In words, for a loader without any state."""
    name = kind_of(loader)
    if isinstance(loader, Generator):
        return (
            f"{name} only runs forward: pass a list, torchdata's StatefulDataLoader, a Grain "
            "dataset, or an iterator with state_dict and load_state_dict"
        )
    if _is(loader, "torch.utils.data", "DataLoader"):
        return (
            f"{name} has no state_dict: torchdata.stateful_dataloader.StatefulDataLoader takes the "
            "same arguments and has one"
        )
    if isinstance(loader, Iterator):
        return (
            f"{name} is an iterator without get_state and set_state (or state_dict and "
            "load_state_dict): pass the loader that it was made from"
        )
    return (
        f"neither {name} nor its iterator has state_dict and load_state_dict, or get_state and "
        "set_state"
    )


def unrecorded(loader: Any) -> str | None:
    """Why a loader with a state is not put back after all: the order is not in its state."""
    if getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        return f"{kind_of(loader)} with in_order=False has no order to come back to: in_order=True"
    samplers = (
        getattr(loader, "sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    for sampler in samplers:
        if _is(sampler, "torch.utils.data", *_UNRECORDED) and not hasattr(sampler, "state_dict"):
            return _order_of(sampler, loader, "shuffle=True")
    node = getattr(loader, "root", None) if _is(loader, "torchdata.nodes", "Loader") else None
    while node is not None:
        sampler = getattr(node, "sampler", None)
        if _is(sampler, "torch", *_UNRECORDED_IN_NODES):
            return _order_of(sampler, loader, "a DistributedSampler")
        node = getattr(node, "source", None)
    return None


def _order_of(sampler: Any, loader: Any, instead: str) -> str:
    return (
        f"{kind_of(loader)} does not record the order of {kind_of(sampler)}: use {instead}, or a "
        "sampler with state_dict and load_state_dict that holds it"
    )


def kind_of(thing: Any) -> str:
    """Its class, with the module."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}".removeprefix("builtins.")


def _is(thing: Any, package: str, *names: str) -> bool:
    return any(
        kind.__name__ in names and kind.__module__.startswith(package)
        for kind in type(thing).__mro__
    )
