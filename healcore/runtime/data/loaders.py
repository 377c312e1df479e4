"""What a user's loader is, and what healcore finds in it: samplers, random generators, epochs.

No loader has to inherit from a class of healcore, which looks for each attribute with `getattr`:

    what the loader offers                         what healcore can do
    ---------------------------------------------  -----------------------------------------------
    `__iter__` or `__getitem__`                    read it, number and skip its batches
    `__len__`                                      know the last batch of an epoch in advance
    `state_dict` and `load_state_dict`             rewind it after a rollback, resume it exactly
    an iterator with `get_state` and `set_state`   the same
    a DataLoader of a map-style dataset            the same, from the random states of its samplers
    a sequence                                     the same, by index
    a function that makes a loader                 the same, by calling the function again
    none of the last five                          continue forward after a rollback
    `set_epoch`                                    give each epoch its order again

A state (`state_dict`, `get_state`) is taken between two batches. It counts the batches that were
yielded, not those that workers have read ahead. It consists of numbers, texts, bytes, containers
and arrays, and may be a live object: it is copied. After `load_state_dict`, the next `iter` begins
at the next batch.

Samplers are followed inwards by `sampler` and `batch_sampler`. The random generators that are
attributes of the loader, its samplers or its dataset are part of a position: `torch.Generator`,
NumPy's `Generator` and `RandomState`, and `random.Random`. Classes of torch, Accelerate, Fabric,
torchdata and datasets are recognized by name and module: the runtime imports none of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import numpy as np

from healcore.runtime.store import values

BatchT = TypeVar("BatchT", covariant=True)


class Indexed(Protocol[BatchT]):
    """Batches by index, as in a torch Dataset. A rewind sets the index.

    An object with `__len__` ends there. An object without `__len__` ends with the first
    `IndexError`.
    """

    def __getitem__(self, index: int, /) -> BatchT:
        """The batch at an index; IndexError after the last one."""
        ...


Loader = Iterable[BatchT] | Indexed[BatchT]
"""What `Healer.batches` takes. It also takes a function without arguments that makes such a
loader."""

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
"""Types of random generators, without subclasses, which may have a state of their own."""


def class_name(thing: object) -> str:
    """Name of an object's class, with its module except for builtins."""
    return values.class_name(type(thing)).removeprefix("builtins.")


def is_type(thing: object, package: str, *names: str) -> bool:
    """Whether an object is of a library's class, or of a subclass.

    Args:
        thing: a loader, a sampler, a dataset, or an iterator of these.
        package: first part of the module's name, such as "torch.utils.data".
        *names: names of classes there. One of them has to be a base of the object's class.
    """
    return any(
        kind.__name__ in names and kind.__module__.startswith(package)
        for kind in type(thing).__mro__
    )


def samplers_of(loader: Any) -> list[Any]:
    """The samplers and batch samplers of a torch loader, outer before inner ones, each once."""
    parts = [loader]
    for part in parts:  # the list grows by the samplers that are found in its parts
        for name in ("sampler", "batch_sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not other for other in parts):
                parts.append(inner)
    return parts[1:]


def generators_of(*parts: Any) -> list[Any]:
    """The random generators that are attributes of some objects, each once."""
    found: dict[int, Any] = {}
    for part in parts:
        for owner in (part, *type(part).__mro__):
            for value in getattr(owner, "__dict__", {}).values():
                if type(value) in _GENERATORS or is_type(value, "torch", "Generator"):
                    found[id(value)] = value
    return list(found.values())


def batch_size(loader: Any) -> int | None:
    """Rows in a batch of a torch loader, or None if it is unknown.

    Positions are counted in batches, so another batch size moves them.
    """
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if type(size) is int:
        return size
    return None


def reads_the_same(loader: Any, other: Any) -> bool:
    """Whether one of two loaders of torch can repeat the epochs of the other.

    A program may make a new loader of the same dataset for each epoch.
    """
    dataset = getattr(loader, "dataset", None)
    is_same = dataset is not None and dataset is getattr(other, "dataset", None)
    same_size = batch_size(loader) == batch_size(other)
    return is_same and same_size and not generators_of(loader, dataset, *samplers_of(loader))


def _epoch_owners(loader: Any) -> list[Any]:
    """The objects with `set_epoch`, or with the count of Fabric's loader, which calls it."""
    parts = (loader, *samplers_of(loader), getattr(loader, "dataset", None))
    owners = []
    for each in parts:
        if callable(getattr(each, "set_epoch", None)) or hasattr(each, "_num_iter_calls"):
            owners.append(each)
    return owners


def epoch_number(loader: Any, default: int) -> int:
    """The number that the program has given to `set_epoch`, or the default if no part has it."""
    for owner in _epoch_owners(loader):
        for name in ("_num_iter_calls", "epoch", "iteration"):  # Fabric, torch, Accelerate
            number = getattr(owner, name, None)
            if type(number) is int:
                return number
    return default


def set_epoch_number(loader: Any, number: int) -> None:
    """Calls `set_epoch` of the loader and its parts.

    A DistributedSampler draws the order of an epoch from this number.
    """
    for owner in _epoch_owners(loader):
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(number)
        else:
            owner._num_iter_calls = number
