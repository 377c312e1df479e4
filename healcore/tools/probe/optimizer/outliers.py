"""Parameters whose second moments are far from those of their like.

Layers are compared with layers: a bias has other gradients than an embedding, and neither is ill.
So log v-hat is taken relative to the median over its like (the same parameter in other layers, of
the same shape; without names, the shape alone), of which there must be three. The unit is the
median absolute deviation from those medians, over all or over its like if that is more; half of
the layers cannot spoil it. What has no like is compared with all, by a coarser measure: a last
norm or an embedding of a healthy net may well have 400 times the median.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.probe.optimizer.layers import layer
from healcore.tools.probe.optimizer.statistics import Moments

_ALIKE = 3
_MEDIAN = 1.4826
_LEAST = 0.1
"""Least spread of log v-hat among its like: layers that start alike may stay alike."""
_LEAST_OF_ALL = 1.5
"""And among all, which are of different kinds."""
_ROUNDING = math.log(1e-10)
"""log v-hat beside the largest in its layer from which on it is rounding: 1e-5 of the gradient."""
_FEWEST = 4
"""Parameters that a spread can be taken of."""


class Deviation(NamedTuple):
    """How one parameter compares with its like."""

    name: str
    rms: float
    """Square root of v-hat: the size of its gradients."""
    ratio: float
    """v-hat over that of its like."""
    sigmas: float
    """The same in robust standard deviations of the logarithm, with its sign."""


def rounding(moments: Iterable[Moments]) -> set[str]:
    """Parameters that get no more than the rounding errors of their layer's gradients.

    A bias before a norm is one: the norm takes it out again, and its true gradient is 0.
    """
    logs = [(each.name, log) for each in moments if (log := each.log_v_hat) is not None]
    largest: dict[str, float] = {}
    for name, log in logs:
        largest[layer(name)] = max(log, largest.get(layer(name), log))
    return {name for name, log in logs if log - largest[layer(name)] < _ROUNDING}


def deviations(moments: Iterable[Moments]) -> list[Deviation]:
    """One for each parameter that can be compared; none if there are too few."""
    logs: dict[str, float] = {}
    likes: dict[str, str] = {}
    members: dict[str, list[float]] = {}
    for each in moments:
        log = each.log_v_hat
        if log is not None:
            logs[each.name], likes[each.name] = log, each.like
            members.setdefault(each.like, []).append(log)
    if len(logs) < _FEWEST:
        return []
    centre = float(np.median(list(logs.values())))
    among = _spread([log - centre for log in logs.values()], _LEAST_OF_ALL)
    alike = {like: np.array(found) for like, found in members.items() if len(found) >= _ALIKE}
    centres = {like: float(np.median(found)) for like, found in alike.items()}
    rests = [found - centres[like] for like, found in alike.items()]
    within = _spread(np.concatenate(rests), _LEAST) if rests else _LEAST
    # Some parameters differ more from layer to layer than others do (the first bias of a block).
    spreads = {like: _spread(found - centres[like], within) for like, found in alike.items()}
    found = []
    for name, log in logs.items():
        like = likes[name]
        away = log - centres.get(like, centre)
        found.append(
            Deviation(name, math.exp(log / 2), _exp(away), away / spreads.get(like, among))
        )
    return found


def _spread(values: Sequence[float] | np.ndarray, least: float) -> float:
    return max(_MEDIAN * float(np.median(np.abs(values))), least)


def _exp(log: float) -> float:
    return math.exp(min(log, 700.0))
