"""Which layer a parameter is of, and which parameters are its like in other layers."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"\d+")


def layer(name: str) -> str:
    """The layer of a parameter: up to the first part of its name with a number in it.

    >>> layer("model.layers.3.mlp.up.weight"), layer("Dense_0.kernel"), layer("embed.weight")
    ('model.layers.3', 'Dense_0', 'embed')
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if _NUMBER.search(part):
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


def role(name: str) -> str:
    """What a parameter is in its layer, the same for its like in other layers.

    >>> role("model.layers.3.mlp.up.weight")
    'model.layers.*.mlp.up.weight'
    """
    return _NUMBER.sub("*", name)
