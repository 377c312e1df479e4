"""Finds what a user's loader consists of: its class, methods, samplers and random generators.

No function here imports a library of loaders: a class of torch or of Hugging Face is recognized by
its name and its module. The attributes that the functions look for are in `loader_protocols`.
"""

from __future__ import annotations

import inspect
import io
import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from healcore.runtime.data.loader_protocols import (
    AnyBatch,
    AnyLoader,
    SamplesInOrder,
)
from healcore.runtime.store import values

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
    for kind in type(thing).__mro__:
        if kind.__name__ in names and kind.__module__.startswith(package):
            return True
    return False


def has_methods(thing: object, names: Iterable[str]) -> bool:
    """Whether an object has all of these methods."""
    return all(callable(getattr(thing, name, None)) for name in names)


def samplers_of(loader: AnyLoader) -> list[SamplesInOrder]:
    """The samplers and batch samplers of a torch loader, including samplers inside samplers.

    `set_epoch` and the random generators of a loader are found in these parts.

    Args:
        loader: the user's loader, of any kind.

    Returns:
        Each sampler once, outer samplers before inner samplers. Empty for a loader without
        samplers.
    """
    parts = [loader]
    for part in parts:  # the list grows by the samplers that are found in its parts
        for name in ("sampler", "batch_sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not other for other in parts):
                parts.append(inner)
    return parts[1:]


def random_generators_of(parts: Iterable[Any]) -> list[Any]:
    """The random generators that are attributes of loaders, samplers and datasets.

    A DataLoader and its sampler often share one generator. Setting its state twice would be
    harmless, but a position would hold it twice. No property is evaluated.

    Args:
        parts: loaders, samplers and datasets.

    Returns:
        Each generator once, in the order of the parts.
    """
    found: dict[int, Any] = {}
    for part in parts:
        for owner in (part, *type(part).__mro__):
            for value in getattr(owner, "__dict__", {}).values():
                if type(value) in _GENERATORS or is_type(value, "torch", "Generator"):
                    found[id(value)] = value
    return list(found.values())


def has_shuffle_buffer(loader: AnyLoader) -> bool:
    """Whether a stream of Hugging Face shuffles in a buffer, which its state does not have.

    Such a stream accepts its `state_dict` and continues, but with an empty buffer: the examples
    that were in the buffer are lost.
    """
    parts = [getattr(loader, "dataset", loader)]
    for part in parts:  # the list grows by the streams inside its parts
        if is_type(part, "datasets", "BufferShuffledExamplesIterable"):
            return True
        inner = [getattr(part, "_ex_iterable", None), getattr(part, "ex_iterable", None)]
        inner += getattr(part, "ex_iterables", ())
        parts += [each for each in inner if each is not None]
    return False


def connects_again(batches: Iterator[AnyBatch]) -> bool:
    """Whether an iterator can probably continue after an exception, where it was.

        a generator                                  no: it has ended with its exception
        a wrapper around another iterator            no: it may have lost what it had read from it
        a Python class that holds no other iterator  yes: a stream that connects again to its server
                                                     decides itself what its next `next` reads

    Open files and responses of a server are iterators too. They count as parts of the connection.
    """
    if not inspect.isfunction(getattr(type(batches), "__next__", None)):
        return False  # the loader is a generator, a `zip` or a `map`
    for each in getattr(batches, "__dict__", {}).values():
        if not isinstance(each, Iterator) or isinstance(each, io.IOBase):
            continue
        if each is not batches:
            return False
    return True
