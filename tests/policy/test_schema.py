"""The tables of a policy file match the engine's configs, and docs/policies.md lists every key."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.clipping import RULES, ZClipConfig
from healcore.core.detectors import CAUSES, DETECTORS
from healcore.core.engine import EngineConfig, RuleConfig
from healcore.core.verdict import Action
from healcore.policy import Policy, load, loads
from healcore.policy.answers import ACTIONS, FAULTS, When
from healcore.policy.document import Detect, NoClip, detector_of
from healcore.policy.tables import keys_of, rounded
from tests.packaging.test_pages import blocks
from tests.policy import key_tables

HEAD = 'schema = 1\nname = "x"\n'


def all_tables() -> set[type]:
    """Every table of the format."""
    found: set[type] = set()
    open_: list[type] = [Policy]
    while open_:
        table = open_.pop()
        if table not in found:
            found.add(table)
            open_ += [part for key in keys_of(table).values() for part in key.tables]
    return found


@pytest.mark.parametrize("table", key_tables.CORE)
def test_defaults_are_those_of_the_engine(table):
    core = key_tables.CORE[table]
    assert rounded(table(), core) == rounded(core())


@pytest.mark.parametrize("table", sorted(all_tables(), key=str))
def test_every_default_is_valid_and_every_key_is_declared(table):
    for name, key in keys_of(table).items():
        assert key.value or key.tables, name
        default = () if key.default == () else key.default
        if key.value and name not in ("schema", "name", "to", "do"):
            assert key.value.check(default) == default, name


def test_every_rule_detector_and_action_of_the_core_can_be_written():
    assert {each.kind for each in keys_of(Policy)["clip"].tables} == {*RULES, "none"}  # type: ignore[attr-defined]
    assert {detector_of(cause) for cause in CAUSES} == set(DETECTORS)
    assert set(ACTIONS.values()) == set(Action)
    assert {*When._fields, "causes", "skip", "action"} == set(RuleConfig._fields)


def test_every_part_of_the_engine_config_is_filled():
    only_host = {"schema", "name", "description", "references", "retry", "skip_batch", "hang"}
    renamed = {"detect": "detectors", "respond": "rules"}
    keys = {renamed.get(name, name) for name in keys_of(Policy).keys() - only_host}
    assert keys == set(EngineConfig._fields)


@pytest.mark.parametrize("name", DETECTORS)
def test_detector_tables_reach_their_detector(name):
    ((got, config),) = loads(f"{HEAD}[detect.{name}]\n").config().detectors
    assert got == name
    assert type(config) is DETECTORS[name]


def test_detectors_run_in_the_core_s_order_whatever_the_file_s():
    text = HEAD + "[detect.update_spike]\n[detect.nonfinite]\n"
    assert [name for name, _ in loads(text).config().detectors] == ["nonfinite", "update_spike"]


def test_floats_reach_the_core_as_float32_and_stay_what_they_were_in_the_policy():
    policy = loads(HEAD + '[clip]\nkind = "zclip"\nema_decay = 0.9700000001\n')
    assert isinstance(policy.clip, ZClipConfig)
    assert policy.clip.ema_decay == 0.9700000001
    decay = rounded(policy.clip).ema_decay
    assert type(decay) is float
    assert decay == float(np.float32(0.97)) != 0.97


def test_names_become_flags():
    text = HEAD + '[detect.nonfinite]\n[[respond]]\nto = ["nonfinite"]\ndo = ["skip", "rollback"]\n'
    (rule,) = loads(text + "when = { consecutive = 3 }\n").config().rules
    assert rule == RuleConfig(causes=3, skip=True, action=int(Action.ROLLBACK), consecutive=3)


def test_a_policy_is_frozen_hashable_and_loads_to_itself():
    policy = load("default")
    with pytest.raises(AttributeError):
        policy.name = "other"  # type: ignore[misc]
    assert load(policy) is policy
    assert hash(policy) == hash(load("default"))
    assert policy == load("default") != load("observe")


PAGE = key_tables.PAGE.read_text()


def test_the_page_has_the_tables_of_the_present_code():
    assert key_tables.written(PAGE) == PAGE, "run python -m tests.policy.key_tables"


def test_the_page_has_a_section_for_every_table_of_a_policy():
    tables = {table for _, found in key_tables.sections() for table in found}
    assert tables == all_tables() - {NoClip, Detect}


def test_every_action_and_cause_is_in_the_table_of_rules():
    section = key_tables.section_of(PAGE, "`[[respond]]`")
    for name in (*CAUSES, *FAULTS, *ACTIONS, "skip"):
        assert f'"{name}"' in section


def test_the_examples_on_the_page_load():
    for block in blocks("policies.md", "toml"):
        loads(block, source="docs/policies.md")


def test_the_python_on_the_page_runs():
    (block,) = blocks("policies.md")
    names: dict[str, object] = {}
    exec(block, names)
    policy = names["policy"]
    assert isinstance(policy, Policy)
    assert policy.clip.kind == "fixed"
