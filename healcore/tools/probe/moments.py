"""Measures the moments of each parameter, and how far they are from those of its like.

Layers are compared with layers: a bias has other gradients than an embedding, and both are healthy.
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

from healcore.tools.probe.adam_states import AdamState
from healcore.tools.probe.parameter_names import layer

_ALIKE = 3
_MEDIAN = 1.4826
_LEAST = 0.1
"""Least spread of log v-hat among its like: layers that start alike may stay alike."""
_LEAST_OF_ALL = 1.5
"""And among all, which are of different kinds."""
_ROUNDING = math.log(1e-10)
"""Below the largest log v-hat of its layer by this much, it is rounding: 1e-5 of the gradient."""
_FEWEST = 4
"""Parameters that a spread can be taken of."""


class Moments(NamedTuple):
    """What was found in the moments of one parameter."""

    name: str
    like: str
    """What it has in common with its like in other layers."""
    size: int
    nonfinite: int
    """NaN and Inf, in all of its moments."""
    negative: int
    """Second moments below 0, which no average of squares is."""
    zeros: int
    """Second moments of exactly 0."""
    mean: float
    """Of the finite second moments."""
    step: float | None
    beta2: float

    @property
    def dead(self) -> bool:
        """Whether no gradient ever was anything but 0."""
        return self.size > 0 and self.zeros == self.size

    @property
    def log_v_hat(self) -> float | None:
        """Log of the mean second moment, corrected for its start at 0; None of a dead one."""
        if not self.mean > 0 or not math.isfinite(self.mean):
            return None
        correction = 1.0
        if self.step is not None and self.step > 0 and 0 < self.beta2 < 1:
            correction = -math.expm1(self.step * math.log(self.beta2))
        return math.log(self.mean) - math.log(correction)


def measured(state: AdamState, name: str, like: str, beta2: float, step: float | None) -> Moments:
    """Reads the moments of a parameter.

    Args:
        state: of the parameter.
        name: of the parameter.
        like: what it has in common with its like.
        beta2: where the state does not hold it.
        step: where the state does not hold it.
    """
    size = nonfinite = negative = zeros = finite = 0
    total = 0.0
    for read in state.second.read():
        # Of complex parameters torch averages the squares of both parts, each for itself.
        piece = read.view(np.real(read).dtype) if np.iscomplexobj(read) else read
        good = np.isfinite(piece)
        values = piece if good.all() else piece[good]
        size += len(piece)
        nonfinite += len(piece) - len(values)
        negative += int(np.count_nonzero(values < 0))
        zeros += int(np.count_nonzero(values == 0))
        finite += len(values)
        total += float(values.sum(dtype=np.float64))
    return Moments(
        name=name,
        like=like,
        size=size,
        nonfinite=nonfinite
        + sum(
            int(np.count_nonzero(~np.isfinite(piece)))
            for array in state.others
            for piece in array.read()
        ),
        negative=negative,
        zeros=zeros,
        mean=total / finite if finite else math.nan,
        step=step if state.step is None else state.step,
        beta2=beta2 if state.beta2 is None else state.beta2,
    )


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
    residuals = [found - centres[like] for like, found in alike.items()]
    within = _spread(np.concatenate(residuals), _LEAST) if residuals else _LEAST
    # Some parameters differ more from layer to layer than others do (the first bias of a block).
    spreads = {like: _spread(found - centres[like], within) for like, found in alike.items()}
    found = []
    for name, log in logs.items():
        like = likes[name]
        away = log - centres.get(like, centre)
        found.append(
            Deviation(
                name, math.exp(log / 2), math.exp(min(away, 700.0)), away / spreads.get(like, among)
            )
        )
    return found


def _spread(values: Sequence[float] | np.ndarray, least: float) -> float:
    return max(_MEDIAN * float(np.median(np.abs(values))), least)
