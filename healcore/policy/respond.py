"""`[[respond]]`: for which causes, what to do, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from healcore.core.detectors import CAUSES
from healcore.core.engine import RuleConfig
from healcore.core.verdict import Action
from healcore.policy.table import Conflict, Table
from healcore.policy.values import Listed, OneOf, OnOff, Whole

SKIP = "skip"
ACTIONS = {action.name.lower(): action for action in Action if action.name}
"""What `do` may name besides "skip", which is no action: the device does it within the step."""


class When(Table):
    """The condition: all that is written has to hold."""

    sustained: OnOff = False
    consecutive: Annotated[int, Whole(least=1, most=1_000_000)] = 1
    # The window is a ring of int32 in the engine's state: its length is memory in every checkpoint.
    count: Annotated[int, Whole(least=0, most=4096)] = 0
    within: Annotated[int, Whole(least=0, most=4096)] = 0

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
    """One rule."""

    to: Annotated[tuple[str, ...], Listed(OneOf(tuple(CAUSES)))]
    do: Annotated[tuple[str, ...], Listed(OneOf((SKIP, *ACTIONS)))]
    when: When = When()

    def config(self) -> RuleConfig:
        """The core's rule: names become flags."""
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
