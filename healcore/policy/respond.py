"""`[[respond]]`: the rules, with their causes, actions and conditions.

A rule names causes of detectors, or faults. Only the host detects faults: exceptions, and steps
that hang. `Policy.config` therefore omits the rules for faults, and the runtime applies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from healcore.core.detectors import CAUSES
from healcore.core.engine import RuleConfig
from healcore.core.ranges import OnOff, listed, one_of, whole
from healcore.core.verdict import Action, Cause
from healcore.policy.errors import Conflict

FAULTS: dict[str, tuple[Cause, tuple[str, ...]]] = {
    "oom": (Cause.OOM, ("shrink_microbatch", "clear_cache", "save")),
    "data": (Cause.DATA, ("skip_batch", "save")),
    "network": (Cause.NETWORK, ("retry", "save")),
    "hang": (Cause.HANG, ("alert", "stop")),
    "unknown": (Cause.UNKNOWN, ("save",)),
}
"""Flag and allowed actions of each fault that `to` may name. Every fault is logged."""

_FAULT_ACTIONS = tuple(dict.fromkeys(name for _, names in FAULTS.values() for name in names))

SKIP = "skip"
ACTIONS = {action.name.lower(): action for action in Action if action.name}
"""Actions that `do` may name, besides "skip", which the device performs within the step."""
_DO = tuple(dict.fromkeys((SKIP, *ACTIONS, *_FAULT_ACTIONS)))


class When(NamedTuple):
    """The condition of a rule: all given keys must hold."""

    sustained: OnOff = False
    """Only alarms that the detector calls sustained are hits."""
    consecutive: Annotated[int, whole(1, 1_000_000)] = 1
    """Hits in a row from which the rule fires."""
    # The window is an int32 ring in the engine's state, so its length takes memory in checkpoints.
    count: Annotated[int, whole(0, 4096)] = 0
    """Hits within the last `within` steps from which the rule fires."""
    within: Annotated[int, whole(0, 4096)] = 0
    """Length of the window for `count`, in steps. Set both or neither."""

    AT_MOST = (("count", "within"),)

    def conflicts(self) -> Iterator[Conflict]:
        """Yields a conflict if `count` or `within` is set alone."""
        if bool(self.count) != bool(self.within):
            present, absent = ("count", "within") if self.count else ("within", "count")
            rule = f"together with {absent}: a number of hits, and a window in steps"
            example = "when = { count = 5, within = 100 }"
            yield (present,), getattr(self, present), rule, example


@dataclass(frozen=True)
class Respond:
    """One rule, either for causes of detectors or for faults."""

    to: Annotated[tuple[str, ...], listed(one_of(*CAUSES, *FAULTS))]
    """Causes to which the rule responds. A cause of a detector needs the table of its detector."""
    do: Annotated[tuple[str, ...], listed(one_of(*_DO))]
    """Actions of the rule."""
    when: When = When()

    @property
    def for_faults(self) -> bool:
        """Whether the rule is for faults; the engine does not see such rules."""
        return self.to[0] in FAULTS

    def conflicts(self) -> Iterator[Conflict]:
        """Yields mixed kinds of causes, and actions that do not fit all causes."""
        for j, cause in enumerate(self.to):
            if (cause in FAULTS) is not self.for_faults:
                kinds = ("a step", "an exception")
                here, there = kinds if self.for_faults else kinds[::-1]
                rule = f"of the same kind as {self.to[0]!r}: one comes from {here}, the other from "
                yield ("to", j), cause, rule + there, f"a separate rule for {cause!r}"
                return
        for cause in self.to:
            allowed = FAULTS[cause][1] if self.for_faults else (SKIP, *ACTIONS)
            for j, action in enumerate(self.do):
                if action not in allowed:
                    choices = ", ".join(f'"{each}"' for each in allowed)
                    rule = f"an action for {cause!r}: one of {choices}"
                    yield ("do", j), action, rule, f"drop {action!r}"
        if self.for_faults and self.when != When():
            given = dict(set(self.when._asdict().items()) - set(When()._asdict().items()))
            rule = "in rules for detectors; faults have [retry], [skip_batch], [hang] and [budget]"
            yield ("when",), given, rule, "drop when"

    def config(self) -> RuleConfig:
        """The core's rule, with flags instead of names; only for rules without faults."""
        causes = action = 0
        for name in self.to:
            causes |= int(CAUSES[name])
        for name in self.do:
            action |= 0 if name == SKIP else int(ACTIONS[name])
        return RuleConfig(causes, SKIP in self.do, action, **self.when._asdict())
