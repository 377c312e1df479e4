"""docs/faults.md agrees with the table of failures, the default policy and the examples."""

import re

import pytest

from healcore.core.decision import NONFINITE, Cause
from healcore.policy import dumps, load, loads
from healcore.policy.document import FAULTS
from healcore.runtime.faults.failures import FAILURES
from tests.packaging.page_text import blocks
from tests.runtime.faults.fault_page import PAGE, ROOT, log_line, section_of


def responses(cause: Cause) -> list[str]:
    """What the policy `default` does about a cause, in the words of its rules."""
    fault = Cause.UNKNOWN if cause is Cause.WORKER else cause  # see `HostPolicy.answers`
    names = {name for name, (flag, _) in FAULTS.items() if flag is fault}
    names |= {"nonfinite"} if cause & NONFINITE else {str(cause.name).lower()}
    done = [word for rule in load("default").respond if names & set(rule.to) for word in rule.do]
    return list(dict.fromkeys(done))


def test_every_row_is_on_the_page():
    table = [line for line in PAGE.splitlines() if line.startswith("[`")]
    table = [re.sub(r"\(#[\w-]+\)", "", line) for line in table]
    wanted = []
    for cause, row in FAILURES.items():
        done = ", ".join(f"`{word}`" for word in responses(cause)) or "can be added"
        wanted.append(f"[`{row.name}`] | `{cause.name}` | {row.severity} | {done}")
    assert table == wanted, "write in docs/faults.md:\n" + "\n".join(wanted)


@pytest.mark.parametrize("cause", FAILURES, ids=lambda cause: cause.name)
def test_each_failure_has_a_section(cause):
    section = section_of(cause)
    row = FAILURES[cause]
    assert row.diagnosis in section
    assert re.search(r"^- \*\*Symptom\*\*: .", section, re.M)
    assert log_line(cause)
    for paper in re.findall(r"arXiv:(\S+)", " ".join(row.references)):
        assert f"arxiv.org/abs/{paper}" in section


def test_the_rule_for_a_cause_that_default_does_not_watch():
    """The page's detector and rule, added to the policy `default`."""
    (added,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.M | re.S)
    policy = loads(f"{dumps(load('default'))}\n{added}")
    assert policy.respond[-1].do == ("alert",)
    assert not any("plateau" in rule.to for rule in load("default").respond)


def test_the_loop_is_of_the_example():
    example = (ROOT / "examples" / "out_of_memory.py").read_text()
    there = {line.partition("  # <- healcore")[0].strip() for line in example.splitlines()}
    (loop,) = blocks("out-of-memory.md")
    assert {line.strip() for line in loop.splitlines()} <= there
