"""Measures the moments of each parameter and compares them with those of similar parameters.

Similar parameters have the same name in other layers and the same shape (without names, the same
shape): a bias has other gradients than an embedding, and both are healthy. With three or more of
them, log v-hat is compared with their median; the unit is the median absolute deviation over all
parameters, or over the similar ones if that is larger. A parameter without similar ones is compared
with all, in a coarser unit: the last norm or the embedding of a healthy network may have 400 times
the median.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.probe.adam_states import AdamState
from healcore.tools.probe.loss_curve import OF_DEVIATION
from healcore.tools.probe.parameter_names import layer

_FEWEST_SIMILAR = 3
_LEAST = 0.1
"""Lower bound of the spread of log v-hat among similar parameters, which may hardly differ."""
_LEAST_OF_ALL = 1.5
"""Lower bound of the spread among all parameters, which are of different kinds."""
_ROUNDING = math.log(1e-10)
"""log v-hat of rounding errors relative to the largest of the layer: 1e-5 of the gradient."""
_FEWEST = 4


class Moments(NamedTuple):
    """What was measured of the moments of one parameter."""

    name: str
    kind: str
    """A key that all parameters have with which it is compared."""
    size: int
    nonfinite: int
    """Number of NaN and Inf in all of its moments."""
    negative: int
    """Number of second moments below 0, which an average of squares cannot be."""
    zeros: int
    mean: float
    step: float | None
    beta2: float

    @property
    def dead(self) -> bool:
        """Whether every gradient so far was exactly 0."""
        return self.size > 0 and self.zeros == self.size

    @property
    def log_v_hat(self) -> float | None:
        """Log of the bias-corrected mean second moment; None if that is not above 0 and finite."""
        if not self.mean > 0 or not math.isfinite(self.mean):
            return None
        correction = 1.0
        if self.step is not None and self.step > 0 and 0 < self.beta2 < 1:
            correction = -math.expm1(self.step * math.log(self.beta2))
        return math.log(self.mean) - math.log(correction)


def measured(state: AdamState, name: str, kind: str, beta2: float, step: float | None) -> Moments:
    """Reads the moments of a parameter; `beta2` and `step` apply where the state has none."""
    size = nonfinite = negative = zeros = finite = 0
    total = 0.0
    for read in state.second.read():
        # For a complex parameter torch averages the squares of the real and imaginary parts.
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
        kind=kind,
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
    """How one parameter compares with similar ones."""

    name: str
    rms: float
    """Square root of v-hat: the RMS of its gradients."""
    ratio: float
    """v-hat over that of similar parameters."""
    sigmas: float
    """log(ratio) in robust standard deviations."""


def rounding(moments: Iterable[Moments]) -> set[str]:
    """Parameters whose gradients are only rounding errors, such as a bias before a norm."""
    logs = [(each.name, log) for each in moments if (log := each.log_v_hat) is not None]
    largest: dict[str, float] = {}
    for name, log in logs:
        largest[layer(name)] = max(log, largest.get(layer(name), log))
    return {name for name, log in logs if log - largest[layer(name)] < _ROUNDING}


def deviations(moments: Iterable[Moments]) -> list[Deviation]:
    """One for each parameter that is not dead; none if there are fewer than four."""
    logs: dict[str, float] = {}
    kinds: dict[str, str] = {}
    members: dict[str, list[float]] = {}
    for each in moments:
        log = each.log_v_hat
        if log is not None:
            logs[each.name], kinds[each.name] = log, each.kind
            members.setdefault(each.kind, []).append(log)
    if len(logs) < _FEWEST:
        return []
    centre = float(np.median(list(logs.values())))
    among = _spread([log - centre for log in logs.values()], _LEAST_OF_ALL)
    by_kind = {
        kind: np.array(found) for kind, found in members.items() if len(found) >= _FEWEST_SIMILAR
    }
    centres = {kind: float(np.median(found)) for kind, found in by_kind.items()}
    residuals = [found - centres[kind] for kind, found in by_kind.items()]
    within = _spread(np.concatenate(residuals), _LEAST) if residuals else _LEAST
    # Some parameters vary more between layers than others (the first bias of a block).
    spreads = {kind: _spread(found - centres[kind], within) for kind, found in by_kind.items()}
    found = []
    for name, log in logs.items():
        kind = kinds[name]
        away = log - centres.get(kind, centre)
        found.append(
            Deviation(
                name, math.exp(log / 2), math.exp(min(away, 700.0)), away / spreads.get(kind, among)
            )
        )
    return found


def _spread(values: Sequence[float] | np.ndarray, least: float) -> float:
    return max(OF_DEVIATION * float(np.median(np.abs(values))), least)
