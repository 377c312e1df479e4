"""Chooses the adapter that saves and restores the state of a loader, by the kind of the loader.

    kind of loader                                   adapter
    -----------------------------------------------  ------------------------------------
    a DataLoader of a map-style dataset              `TorchLoader`
    a function that makes a loader                   `FunctionLoader`
    `state_dict` and `load_state_dict`               `StatefulLoaderAdapter`
    an iterator with `get_state` or `state_dict`     `StatefulIteratorAdapter`
    a sequence, or `__getitem__` without `__iter__`  `IndexedAdapter`
    anything else to iterate over                    `LoaderAdapter`, cannot be rewound

The attributes of a loader that are looked at are in `loader_parts`.
"""

from __future__ import annotations

from collections.abc import Sequence

from healcore.runtime.data.loader_adapter import LoaderAdapter, RewindObstacle
from healcore.runtime.data.loader_parts import (
    GET_STATE,
    STATE_DICT,
    AnyLoader,
    class_name,
    has_methods,
    has_shuffle_buffer,
    is_type,
    random_generators_of,
    samplers_of,
)
from healcore.runtime.data.stateful_loaders import (
    IndexedAdapter,
    StatefulIteratorAdapter,
    StatefulLoaderAdapter,
)
from healcore.runtime.data.torch_loader import TorchLoader, is_replayable

_UNRECORDED = ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler")
"""Samplers that draw a new order in every epoch and do not record it. A restored torchdata loader
then skips forward through a different order, without a warning."""


def adapter_for(loader: AnyLoader) -> LoaderAdapter:
    """Chooses the adapter for a loader that is no function.

    A loader can have an attribute `why_not`, see `loader_parts`. A loader of healcore's own, such
    as `ScanBlocks`, is its own adapter.

    Args:
        loader: something to iterate over, or with `__getitem__`. If only its iterator can have a
            state, the first epoch begins here, which may draw random numbers.
    """
    if isinstance(loader, LoaderAdapter):
        return loader
    if is_replayable(loader):
        return TorchLoader(loader)
    explains = hasattr(loader, "why_not")
    obstacle = None
    if not explains:
        obstacle = _state_obstacle(loader)
    elif loader.why_not:
        obstacle = RewindObstacle(loader.why_not)
    if obstacle is None:
        return StatefulLoaderAdapter(loader)
    if explains or has_methods(loader, STATE_DICT):
        return LoaderAdapter(loader, obstacle=obstacle)
    if isinstance(loader, Sequence) or not hasattr(loader, "__iter__"):
        return IndexedAdapter(loader)
    first = iter(loader)
    for names in (GET_STATE, STATE_DICT):
        if has_methods(first, names):
            return StatefulIteratorAdapter(loader, first, names)
    return LoaderAdapter(loader, obstacle=obstacle, first=first)


def _state_obstacle(loader: AnyLoader) -> RewindObstacle | None:
    """Why a loader has no exact `state_dict`, and what to use instead; None if it has one."""
    name = class_name(loader)
    if is_type(loader, "accelerate.data_loader", "DataLoaderDispatcher"):
        return RewindObstacle(
            f"{name} reads for all ranks on one rank",
            "use dispatch_batches=False and a map-style dataset",
        )
    if is_type(loader, "accelerate.data_loader", "DataLoaderAdapter"):
        return RewindObstacle(
            f"{name} does not record the position in an IterableDataset",
            "use a map-style dataset, or pass torchdata's StatefulDataLoader to the Healer without "
            "preparing it",
        )
    if not has_methods(loader, STATE_DICT):
        article = "a"
        if name[0].lower() in "aeiou":
            article = "an"
        return RewindObstacle(
            f"{article} {name} cannot be rewound",
            "it has no state_dict and load_state_dict (or get_state and set_state). Pass a list, a "
            "torch DataLoader of a map-style dataset, torchdata's StatefulDataLoader, a Grain "
            "dataset, a loader whose iterator has these methods, or a function that makes the "
            "stream again: lambda: zip(a, b)",
        )
    return _exactness_obstacle(loader, name)


def _exactness_obstacle(loader: AnyLoader, name: str) -> RewindObstacle | None:
    """Why the `state_dict` of a loader does not determine what follows, or None if it does."""
    if has_shuffle_buffer(loader):
        reason = f"{name} does not record its shuffle buffer"
        return RewindObstacle(reason, "use a map-style dataset, with shuffle")
    if is_type(loader, "torchdata.nodes", "Loader"):
        return RewindObstacle(f"{name} reads ahead into the next epoch", "use StatefulDataLoader")
    if getattr(loader, "num_workers", 0) and getattr(loader, "in_order", True) is False:
        reason = f"{name} with in_order=False has no fixed order"
        return RewindObstacle(reason, "use in_order=True")
    for sampler in samplers_of(loader):
        draws = is_type(sampler, "torch.utils.data", *_UNRECORDED)
        if random_generators_of([sampler]) and not is_type(sampler, "torchdata", "RandomSampler"):
            draws = True
        if draws and not hasattr(sampler, "state_dict"):
            return RewindObstacle(
                f"{name} does not record the order of {class_name(sampler)}",
                "use shuffle=True, or a sampler that records the order in its state_dict",
            )
    return None
