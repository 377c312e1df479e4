"""Compares the moments of each parameter with the moments of similar parameters.

Similar parameters have the same name in other layers and the same shape. Without names, they have
the same place in repeated blocks. A healthy bias has other gradients than a healthy embedding.

With three or more similar parameters, log v-hat is compared with their median. The unit is the
median absolute deviation over all parameters, or over the similar parameters if that is larger.
Without similar parameters, log v-hat is compared with all parameters in a coarser unit, because the
embedding of a healthy network may have 400 times the median.

If the moments of many layers rise together, the median is among the risen moments. So if the layers
form groups, the lowest group is the baseline (`_lowest_group`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from healcore.tools.probe.loss_curve import MAD_TO_SIGMA
from healcore.tools.probe.moments import Moments, Shape

_MIN_SIMILAR = 3
_MIN_SPREAD = 0.1
"""Lower bound of the spread of log v-hat among similar parameters, which may hardly differ."""
_MIN_SPREAD_OF_ALL = 1.5
"""Lower bound of the spread of log v-hat among all parameters, which differ in kind."""
_LOG_ROUNDING = math.log(1e-10)
"""log v-hat of rounding errors relative to the largest in the layer: 1e-5 of the gradient."""
_MIN_PARAMETERS = 4
_MIN_GAP = math.log(10)
"""Smallest distance of two groups of layers, because healthy layers differ gradually."""
_RISEN_FRACTION = 0.3
"""If a larger fraction of the layers is above the lowest group, that group is the baseline."""

_Levels = dict[str, list[float]]
"""Values of log v-hat by layer."""


class Deviation(NamedTuple):
    """Comparison of one parameter with similar parameters."""

    name: str
    layer: str
    rms: float
    """Square root of v-hat: the RMS of the gradients."""
    ratio: float
    """v-hat divided by the v-hat of similar parameters."""
    sigmas: float
    """log(ratio) in robust standard deviations."""
    similar: bool
    """Whether the parameter has at least two similar parameters."""
    risen: bool
    """Whether the layer is in a group of layers above the baseline."""


def find_rounding(moments: Iterable[Moments]) -> set[str]:
    """Names the parameters whose gradients are rounding errors, such as a bias before a norm."""
    logs = _logs(moments)
    largest: dict[str, float] = {}
    for each, log in logs:
        largest[each.layer] = max(log, largest.get(each.layer, log))
    return {each.name for each, log in logs if log - largest[each.layer] < _LOG_ROUNDING}


def deviations(moments: Iterable[Moments]) -> list[Deviation]:
    """Compares parameters that are not dead; returns an empty list for fewer than four."""
    logs = _logs(moments)
    if len(logs) < _MIN_PARAMETERS:
        return []
    members: dict[tuple[str, Shape], list[tuple[str, float]]] = defaultdict(list)
    for each, log in logs:
        members[each.kind].append((each.layer, log))
    members = {kind: found for kind, found in members.items() if len(found) >= _MIN_SIMILAR}
    centre = float(np.median([log for _, log in logs]))
    spread_of_all = _spread([log - centre for _, log in logs], _MIN_SPREAD_OF_ALL)
    baselines = _baselines(members)
    by_kind = {
        kind: np.array([log for layer, log in found if layer in baselines[kind]])
        for kind, found in members.items()
    }
    centres = {kind: float(np.median(found)) for kind, found in by_kind.items()}
    residuals = [found - centres[kind] for kind, found in by_kind.items()]
    within = _spread(np.concatenate(residuals), _MIN_SPREAD) if residuals else _MIN_SPREAD
    # Some parameters vary more between layers than others (the first bias of a block).
    spreads = {kind: _spread(found - centres[kind], within) for kind, found in by_kind.items()}
    found = []
    for each, log in logs:
        distance = log - centres.get(each.kind, centre)
        rms, ratio = math.exp(log / 2), math.exp(min(distance, 700.0))
        sigmas = distance / spreads.get(each.kind, spread_of_all)
        similar = each.kind in members
        risen = similar and each.layer not in baselines[each.kind] and distance > 0
        found.append(Deviation(each.name, each.layer, rms, ratio, sigmas, similar, risen))
    return found


def _logs(moments: Iterable[Moments]) -> list[tuple[Moments, float]]:
    return [(each, log) for each in moments if (log := each.log_v_hat) is not None]


def _baselines(
    members: Mapping[tuple[str, Shape], Sequence[tuple[str, float]]],
) -> dict[tuple[str, Shape], set[str]]:
    """Returns the baseline layers for each kind of parameter.

    The level of a layer is the median over its parameters. If layers form no groups by level, each
    kind of parameter has its own baseline.
    """
    named = {kind: found for kind, found in members.items() if kind[0]}
    all_logs: _Levels = defaultdict(list)
    for found in named.values():
        middle = float(np.median([log for _, log in found]))
        for layer, log in found:
            all_logs[layer].append(log - middle)
    low = _lowest_group(all_logs)
    baselines = {}
    for kind, found in members.items():
        own: _Levels = defaultdict(list)
        for layer, log in found:
            own[layer].append(log)
        layers = set(own)
        if kind in named:
            layers = _lowest_group(own) if len(low) == len(all_logs) else low & layers or layers
        baselines[kind] = layers
    return baselines


def _lowest_group(logs: _Levels) -> set[str]:
    """Returns the layers of the lowest group, or all layers if few layers are above that group.

    A group has at least two layers, and a gap of `_MIN_GAP` separates it from the next group.
    """
    levels = sorted((float(np.median(found)), layer) for layer, found in logs.items())
    groups = [levels[:1]]
    for before, level in pairwise(levels):
        if level[0] - before[0] > _MIN_GAP:
            groups.append([])
        groups[-1].append(level)
    low, *above = [group for group in groups if len(group) > 1] or [levels]
    risen = sum(map(len, above)) > _RISEN_FRACTION * len(levels)
    return {layer for _, layer in (low if risen else levels)}


def _spread(values: Sequence[float] | np.ndarray, least: float) -> float:
    return max(MAD_TO_SIGMA * float(np.median(np.abs(values))), least)
