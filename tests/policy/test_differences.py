"""`diff`: which keys of two policies differ, with rules that have moved."""

import pytest

from healcore.policy import diff, load

SKIP = {"to": ["nonfinite"], "do": ["skip"]}
BACK = {"to": ["nonfinite"], "do": ["rollback"], "when": {"consecutive": 10}}
ALERT = {"to": ["loss_spike"], "do": ["alert"]}
SAVE = {"to": ["oom"], "do": ["save"]}
LATER = {**BACK, "when": {"consecutive": 20}}
STOP = {**BACK, "do": ["stop"]}
KEYS = ("to", "do", *(f"when.{key}" for key in load("default").respond[0].when._fields))
RULES = [SKIP, BACK, ALERT, SAVE]

CASES = {
    "a rule before the others": ([SAVE, SKIP, BACK, ALERT], {}),
    "another order": ([ALERT, SAVE, BACK, SKIP], {}),
    "the first is gone": (
        RULES[1:],
        dict.fromkeys(f"respond[0].{key}" for key in KEYS),
    ),
    "a condition of one of two": ([ALERT, SKIP, LATER, SAVE], {"respond[1].when.consecutive": 20}),
    "an action of one of two": ([STOP, SKIP, SAVE, ALERT], {"respond[1].do": ["stop"]}),
    "one cause more": (
        [SKIP, BACK, {**ALERT, "to": ["loss_spike", "divergence"]}, SAVE],
        {"respond[2].to": ["loss_spike", "divergence"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rules_are_compared_by_their_causes_and_then_by_their_conditions(case):
    changed, expected = CASES[case]
    detect = {"divergence": {}}
    left, right = (load("default", detect=detect, respond=each) for each in (RULES, changed))
    assert {key: value for key, _, value in diff(left, right)} == expected


def test_a_rule_that_only_one_policy_has_is_listed_behind_the_others():
    left, right = load("default", respond=RULES[:2]), load("default", respond=[ALERT, *RULES[:2]])
    found = diff(left, right)
    assert {each.key.partition(".")[0] for each in found} == {"respond[2]"}
    assert all(each.left is None for each in found)
    assert ("respond[2].to", None, ["loss_spike"]) in found
    assert {key.partition(".")[0] for key, *_ in diff(right, left)} == {"respond[0]"}
