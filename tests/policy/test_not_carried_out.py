"""A value that nothing in healcore carries out is refused when the policy is loaded."""

from __future__ import annotations

import pytest

from healcore.policy import PolicyError, dumps, load, loads, preset_names, recipe_names

HEAD = 'schema = 1\nname = "x"\n[detect.nonfinite]\n'


def rule(to: str, do: str) -> str:
    return f'{HEAD}[[respond]]\nto = ["{to}"]\ndo = ["{do}"]\n'


def test_a_cause_that_nothing_sees():
    with pytest.raises(PolicyError) as caught:
        loads(rule("hang", "save"))
    (problem,) = caught.value.problems
    assert (problem.key, problem.value) == ("respond[0].to[0]", '"hang"')
    assert "watches from outside of the step" in problem.rule
    assert problem.write.startswith('drop "hang"')


def test_keywords_are_refused_alike():
    with pytest.raises(PolicyError, match="watches from outside of the step"):
        load("default", respond=[{"to": ["hang"], "do": ["save"]}])


def test_a_misspelt_cause_still_gets_a_suggestion():
    with pytest.raises(PolicyError, match='write: "nonfinite"'):
        loads(rule("nonfinit", "alert"))


@pytest.mark.parametrize("name", [*preset_names(), *recipe_names()])
def test_the_policies_of_healcore_have_none_of_them(name):
    assert loads(dumps(load(name))) == load(name)
