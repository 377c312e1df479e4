"""What healcore looks for in a user's loader: its class, methods, samplers and random generators.

No loader has to inherit from a class of healcore. healcore looks for each attribute with `getattr`
and `hasattr`, and uses what it finds:

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
    `why_not`                                      say why the loader cannot be rewound

A state (`state_dict`, `get_state`) is taken between two batches, at each checkpoint. It counts the
batches that were yielded, not the batches that workers have read ahead. It consists of numbers,
texts, bytes, containers and arrays, and may be a live object: it is copied. After
`load_state_dict`, the next `iter` begins at the next batch. healcore keeps an iterator with a state
and sets the state on it, because a new iterator may shuffle in another way.

`set_epoch` of the loader, its samplers and its dataset is called at the start of each epoch with
the next number, and with the earlier number after a rollback. In an epoch that the program's loop
has begun, the program has called `set_epoch` already: healcore reads the number from `epoch`, or
from `iteration` of a loader of Accelerate.

Samplers are followed inwards by `sampler` and `batch_sampler`. The random generators that are
attributes of the loader, its samplers or its dataset are part of a position: `torch.Generator`,
NumPy's `Generator` and `RandomState`, and `random.Random`. A sampler that draws from elsewhere
gives another order after a rewind. healcore notices this by a digest of the indices, and then does
not rewind the loader. `batch_size` and `num_replicas` say how many rows a global batch has: a
restart with another number of ranks continues only if this number stays equal.

`why_not` is the reason why a loader cannot be rewound, as a sentence without a full stop. With None
the loader has an exact `state_dict`, and healcore examines it no further.

Classes of torch, Accelerate, Fabric, torchdata and datasets are recognized by name and module,
because the runtime imports none of these libraries.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import numpy as np

from healcore.runtime.store import values

AnyBatch = Any
"""A batch, as the loader yields it: healcore looks at none of its attributes to read the data.

A batch may be of any type, and healcore passes it to the loop unchanged. A run that compares
weights keeps references to some batches of recent steps, and passes them to the user's `loss_fn`
again. So a program should not change a batch in place after its step.
"""
LoaderState = Any
"""The state of a loader or an iterator, which only its adapter understands.

A checkpoint holds it as text of `runtime.store.values`. So it consists of numbers, texts, bytes,
containers, and arrays of NumPy, torch or JAX. Any other object makes the loader one that cannot be
rewound.
"""
AnyLoader = Any
"""A user's loader, whose attributes are looked up as this file describes."""

BatchT = TypeVar("BatchT", covariant=True)


class Indexed(Protocol[BatchT]):
    """Batches by index, as in a torch Dataset. A rewind sets the index.

    An object with `__len__` ends there. An object without `__len__` ends with the first
    `IndexError`. Such data can be rewound at no cost, because no batch before the position is read.
    """

    def __getitem__(self, index: int, /) -> BatchT:
        """The batch at an index; IndexError after the last one."""
        ...


Loader = Iterable[BatchT] | Indexed[BatchT]
"""What `Healer.batches` takes. It also takes a function without arguments that makes such a
loader."""

STATE_DICT = ("state_dict", "load_state_dict")
"""The methods of a loader with a state, such as torchdata's `StatefulDataLoader`."""
GET_STATE = ("get_state", "set_state")
"""The methods of an iterator with a state, such as Grain's."""
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


def samplers_of(loader: AnyLoader) -> list[Any]:
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


def own_generators(loader: AnyLoader) -> list[Any]:
    """The random generators of a loader, its samplers and its dataset."""
    dataset = getattr(loader, "dataset", None)
    return random_generators_of((loader, dataset, *samplers_of(loader)))


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


def batch_size(loader: AnyLoader) -> int | None:
    """Rows in a batch of a torch loader, or None if it is unknown.

    Positions are counted in batches, so another batch size moves them.
    """
    sampler = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(sampler, "batch_size", None)
    if type(size) is not int:
        return None
    return size
