"""A key or value that nothing in healcore carries out is refused when the policy is loaded."""

from __future__ import annotations

import pytest

from healcore.policy import PolicyError, dumps, load, loads, preset_names, recipe_names

HEAD = 'schema = 1\nname = "x"\n[detect.nonfinite]\n'


def rule(to: str, do: str) -> str:
    return f'{HEAD}[[respond]]\nto = ["{to}"]\ndo = ["{do}"]\n'


@pytest.mark.parametrize("cause", ["oom", "data", "network", "hang", "unknown"])
def test_a_cause_that_nothing_sees(cause):
    with pytest.raises(PolicyError) as caught:
        loads(rule(cause, "alert"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("respond[0].to[0]", f'"{cause}"')
    assert "this version of healcore sees" in problem.rule
    assert f'"{cause}"' in problem.write
    assert problem.write.startswith("drop")


@pytest.mark.parametrize("action", ["shrink_microbatch", "clear_cache", "retry"])
def test_an_action_that_nothing_takes(action):
    with pytest.raises(PolicyError) as caught:
        loads(rule("nonfinite", action))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("respond[0].do[0]", f'"{action}"')
    assert "this version of healcore carries out" in problem.rule
    assert problem.write.startswith(f'drop "{action}"')


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("[retry]\nbase_delay_s = 30\n", "retry", "{'base_delay_s': 30}"),
        ("[budget]\nshrinks = 2\n", "budget.shrinks", "2"),
    ],
)
def test_a_key_that_nothing_reads(text, key, value):
    with pytest.raises(PolicyError) as caught:
        loads(HEAD + text)
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == (key, value)
    assert "this version of healcore carries out" in problem.rule
    assert problem.write.startswith("drop")


def test_keywords_are_refused_alike():
    with pytest.raises(PolicyError, match=r"budget\.shrinks = 2\n.*carries out"):
        load("default", budget={"shrinks": 2})


def test_a_misspelt_cause_still_gets_a_suggestion():
    with pytest.raises(PolicyError, match='write: "nonfinite"'):
        loads(rule("nonfinit", "alert"))


@pytest.mark.parametrize("name", [*preset_names(), *recipe_names()])
def test_the_policies_of_healcore_have_none_of_them(name):
    assert loads(dumps(load(name))) == load(name)
