"""`[[respond]]`: the rules that say what is done about which causes, and when.

Rules name causes that detectors find, or faults, which only the host sees: exceptions, and steps
that never return. No step is judged for a fault. So `Policy.config` leaves the rules for faults
out, and the runtime carries them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from healcore.core.detectors import CAUSES
from healcore.core.engine import RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.policy.table import Conflict, OnOff, Table, listed, one_of, whole

FAULTS: dict[str, tuple[Cause, tuple[str, ...]]] = {
    "oom": (Cause.OOM, ("shrink_microbatch", "clear_cache", "save")),
    "data": (Cause.DATA, ("skip_batch", "save")),
    "network": (Cause.NETWORK, ("retry", "save")),
    "hang": (Cause.HANG, ("alert", "stop")),
    "unknown": (Cause.UNKNOWN, ("save",)),
}
"""The faults that `to` may name: the flag, and what `do` may answer. Each is logged in any case."""

_FAULT_ACTIONS = tuple(dict.fromkeys(name for _, names in FAULTS.values() for name in names))

SKIP = "skip"
ACTIONS = {action.name.lower(): action for action in Action if action.name}
"""What `do` may name, in addition to "skip", which the device does within the step."""
_DO = tuple(dict.fromkeys((SKIP, *ACTIONS, *_FAULT_ACTIONS)))


class When(Table):
    """The condition: all that is written has to hold."""

    sustained: OnOff = False
    consecutive: Annotated[int, whole(least=1, most=1_000_000)] = 1
    # The window is a ring of int32 in the engine's state: its length is memory in every checkpoint.
    count: Annotated[int, whole(least=0, most=4096)] = 0
    within: Annotated[int, whole(least=0, most=4096)] = 0

    def conflicts(self) -> Iterator[Conflict]:
        """Both of `count` and `within` or neither, and the count has to fit."""
        if bool(self.count) != bool(self.within):
            there, absent = ("count", "within") if self.count else ("within", "count")
            yield Conflict(
                (there,),
                getattr(self, there),
                f"together with {absent}: how many hits, within how many steps",
                "when = { count = 5, within = 100 }",
            )
        elif self.count > self.within:
            yield Conflict(
                ("count",),
                self.count,
                f"at most within, which is {self.within}: one step has one hit",
                f"count = {self.within}, or a longer window",
            )


class Respond(Table):
    """One rule: for causes that detectors find, or for faults; never for both."""

    to: Annotated[tuple[str, ...], listed(one_of(*CAUSES, *FAULTS))]
    do: Annotated[tuple[str, ...], listed(one_of(*_DO))]
    when: When = When()

    @property
    def for_faults(self) -> bool:
        """Whether it answers faults, and the engine does not have it."""
        return self.to[0] in FAULTS

    def conflicts(self) -> Iterator[Conflict]:
        """One kind of cause, and only what answers all of them."""
        for j, cause in enumerate(self.to):
            if (cause in FAULTS) is not self.for_faults:
                kinds = ("a step", "an exception")
                here, there = kinds if self.for_faults else kinds[::-1]
                yield Conflict(
                    ("to", j),
                    cause,
                    f"of the same kind as {self.to[0]!r}: one is found in {here}, the other in "
                    f"{there}",
                    f"a rule of its own for {cause!r}",
                )
                return
        for cause in self.to:
            allowed = FAULTS[cause][1] if self.for_faults else (SKIP, *ACTIONS)
            for j, action in enumerate(self.do):
                if action not in allowed:
                    choices = ", ".join(f'"{each}"' for each in allowed)
                    rule = f"an answer to {cause!r}: one of {choices}"
                    yield Conflict(("do", j), action, rule, f"drop {action!r}")
        if self.for_faults and self.when != When():
            yield Conflict(
                ("when",),
                self.when.model_dump(exclude_defaults=True),
                "for causes of a step: the limits of a fault are in [retry], [skip_batch], [hang] "
                "and [budget]",
                "drop when",
            )

    def config(self) -> RuleConfig:
        """The core's rule: names become flags. Not for a rule for faults."""
        causes = action = 0
        for name in self.to:
            causes |= int(CAUSES[name])
        for name in self.do:
            action |= 0 if name == SKIP else int(ACTIONS[name])
        return RuleConfig(
            causes=causes,
            skip=SKIP in self.do,
            action=action,
            sustained=self.when.sustained,
            consecutive=self.when.consecutive,
            count=self.when.count,
            within=self.when.within,
        )
