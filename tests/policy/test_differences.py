"""`diff`: which keys of two policies differ; rules are compared by their number."""

from healcore.policy import diff, load

SKIP = {"to": ["nonfinite"], "do": ["skip"]}
BACK = {"to": ["nonfinite"], "do": ["rollback"], "when": {"consecutive": 10}}


def test_rules_are_compared_by_their_number():
    left = load("default", respond=[SKIP, BACK])
    later = {**BACK, "when": {"consecutive": 20}}
    right = load(left, respond=[{**SKIP, "do": ["alert"]}, later])
    assert diff(left, right) == (
        ("respond[0].do", ["skip"], ["alert"]),
        ("respond[1].when.consecutive", 10, 20),
    )


def test_a_rule_that_only_one_policy_has_is_listed_by_its_keys():
    found = diff(load("default", respond=[SKIP]), load("default", respond=[SKIP, BACK]))
    assert {each.key.partition(".")[0] for each in found} == {"respond[1]"}
    assert all(each.left is None for each in found)
    assert ("respond[1].to", None, ["nonfinite"]) in found
