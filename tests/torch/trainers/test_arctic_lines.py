"""Each action that the host has to carry out has a line under ArcticTraining."""

from __future__ import annotations

from healcore.core.verdict import Action, Cause, names
from healcore.torch.trainers.arctic import order_line


def test_every_combination_of_actions_is_written_in_words():
    for flags in range(2 ** len(Action)):
        action = Action(flags)
        line = order_line(7, Cause.LOSS_SPIKE, action)
        if not action & (Action.SAVE | Action.ROLLBACK | Action.STOP):
            assert not line, "the step itself has done it"
            continue
        assert line.startswith("step 7: loss spike: the policy orders ")
        ordered = line.split("orders ")[1].split(";")[0].split(" and ")
        assert ordered == [each.lower() for each in names(action)]
        cannot = [each for each in ("save", "rollback") if each in ordered]
        assert ("cannot carry out " + " and ".join(cannot) + ":" in line) == bool(cannot)
