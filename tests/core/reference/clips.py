"""The reference's clipping rules, from their docstrings: Python floats, lists, ifs.

Each has `see(norm, groups, learn, restart) -> Clipped`; `norm` and `groups` are finite.
"""

import math
from typing import Any, NamedTuple

from tests.core.reference.ties import Ties, Watch, warmup


class Clipped(NamedTuple):
    """One verdict; per-tensor rules give lists."""

    scale: Any
    clipped: bool
    threshold: float = 0.0
    z: float = 0.0


def factor(limit: float, norm: float) -> float:
    """The factor that brings `norm` down to `limit`."""
    return limit / (norm + 1e-6)


class ZClip:
    """Mean and variance of a list in warm-up, of the recursion after it."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.history: list[float] = []
        self.mean = self.var = 0.0
        self.watch = Watch(config.shift, ties)

    def see(self, norm: float, groups: Any, learn: bool, restart: bool) -> Clipped:
        c = self.config
        if restart:
            self.history = []
            self.watch.clear()
        warm = len(self.history) < c.warmup_steps
        sigma = max(math.sqrt(self.var), c.min_rel_std * self.mean)
        spike, target, z, threshold = False, norm, 0.0, 0.0
        if not warm:
            threshold = self.mean + c.z_threshold * sigma
            z = (norm - self.mean) / sigma if sigma > 0 else 0.0
            spike = self.ties.above(norm, threshold)
            if spike:
                target = {
                    "reciprocal": self.mean + c.z_threshold**2 * sigma / z if z else 0.0,
                    "mean": self.mean,
                    "max": threshold,
                }[c.target]
        accepted, effective = target, target
        if c.max_norm is not None:
            effective = min(effective, c.max_norm)
            threshold = min(threshold or c.max_norm, c.max_norm)
        over = self.ties.above(norm, effective) if effective != norm else False
        if learn and norm > 0:
            self._learn(norm, accepted, warm, spike)
        return Clipped(factor(effective, norm) if over else 1.0, over, threshold, z)

    def _learn(self, norm: float, accepted: float, warm: bool, spike: bool) -> None:
        if warm:
            past = self.history
            if past:
                norm, forget = warmup(norm, sum(past) / len(past), self.ties)
                if forget:
                    past.clear()
            past.append(norm)
            self.mean = sum(past) / len(past)
            self.var = sum((x - self.mean) ** 2 for x in past) / len(past)
            return
        a = self.config.ema_decay
        self.mean = a * self.mean + (1 - a) * accepted
        self.var = a * self.var + (1 - a) * (accepted - self.mean) ** 2
        if self.watch.see(norm, spike):
            self.mean, self.var = self.watch.level, self.watch.spread


class Fixed:
    """A fixed limit."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.limit, self.ties = config.max_norm, ties

    def see(self, norm: float, groups: Any, learn: bool, restart: bool) -> Clipped:
        over = self.ties.above(norm, self.limit)
        return Clipped(factor(self.limit, norm) if over else 1.0, over, self.limit)


class AutoClip:
    """A dictionary of bins, sixteen to the octave; halved when two windows are in it."""

    def __init__(self, config: Any, ties: Ties) -> None:
        self.config, self.ties = config, ties
        self.bins: dict[int, int] = {}

    def see(self, norm: float, groups: Any, learn: bool, restart: bool) -> Clipped:
        c = self.config
        if restart:
            self.bins = {}
        if learn and norm > 0:
            place = math.log2(norm) * 16
            self.ties.above(place - round(place), 0.0, 1.0)  # at an edge float32 may go either way
            index = min(max(math.floor(place), -512), 511)
            self.bins[index] = self.bins.get(index, 0) + 1
        total = sum(self.bins.values())
        limit = math.inf
        if total:
            limit = self._percentile(c.percentile / 100 * total)
        if total >= 2 * c.window:
            self.bins = {index: n // 2 for index, n in self.bins.items() if n // 2}
        if c.max_norm is not None:
            limit = min(limit, c.max_norm)
        over = self.ties.above(norm, limit) if limit < math.inf else False
        return Clipped(factor(limit, norm) if over else 1.0, over, limit if limit < math.inf else 0)

    def _percentile(self, rank: float) -> float:
        below = 0
        for index in sorted(self.bins):
            below += self.bins[index]
            if not self.ties.above(rank, below):
                return 2 ** ((index + 1) / 16)
        raise AssertionError(f"rank {rank} of {below}")


class AdaGC:
    """One level per tensor."""

    def __init__(self, config: Any, ties: Ties, groups: int) -> None:
        self.config, self.ties = config, ties
        self.count = 0
        self.gamma: list[float] = [0.0] * groups
        self.watches = [Watch(config.shift, ties) for _ in range(groups)]

    def see(self, norm: float, groups: Any, learn: bool, restart: bool) -> Clipped:
        c = self.config
        if restart:
            self.count = 0
            self.gamma = [0.0] * len(self.gamma)
            for watch in self.watches:
                watch.clear()
        warm = self.count < c.warmup_steps
        shared = 1.0
        if self.ties.above(norm, c.max_norm):
            shared = factor(c.max_norm, norm)
        scales = []
        clipped = warm and shared != 1.0
        for i, each in enumerate(groups):
            limit = c.ratio * self.gamma[i]
            over = not warm and limit > 0 and self.ties.above(each, limit)
            clipped |= over
            scales.append(shared if warm else factor(limit, each) if over else 1.0)
            if learn and each > 0:
                self._learn(i, each, shared * each, warm, over, limit)
        if learn and warm and norm > 0:
            self.count += 1
        return Clipped(scales, clipped)

    def _learn(
        self, i: int, raw: float, shared: float, warm: bool, over: bool, limit: float
    ) -> None:
        gamma = self.gamma[i]
        if warm:
            self.gamma[i] = shared if gamma == 0 else min(gamma, shared)
        else:
            b = self.config.ema_decay
            self.gamma[i] = raw if gamma == 0 else b * gamma + (1 - b) * (limit if over else raw)
            if self.watches[i].see(raw, over):
                self.gamma[i] = self.watches[i].level


RULES = {"zclip": ZClip, "fixed": Fixed, "autoclip": AutoClip, "adagc": AdaGC}
