"""The tables of a policy file match the engine's configs, and docs/policies.md lists every key."""

from typing import Any

import numpy as np
import pytest

from healcore.core.clipping import ZClipConfig
from healcore.core.decision import Action
from healcore.core.detectors import CAUSES, DETECTORS, Detect
from healcore.core.engine import EngineConfig, RuleConfig
from healcore.policy import Policy, from_dict, loads, to_dict
from healcore.policy.document import ACTIONS, FAULTS, NoClip, When, detector_of, rounded
from tests.core.policies import RULES
from tests.packaging.page_text import blocks
from tests.policy import key_tables
from tests.policy.key_tables import keys_of

HEAD = 'schema = 1\nname = "x"\n'


def all_tables() -> set[type]:
    found: list[type] = [Policy]
    for table in found:  # which grows
        parts = (part for key in keys_of(table).values() for part in key.tables)
        found += dict.fromkeys(part for part in parts if part not in found)
    return set(found)


def test_a_file_has_all_of_the_engine_with_its_defaults():
    for table, core in key_tables.CORE.items():
        assert rounded(table(), core) == rounded(core())
    keys = keys_of(Policy)
    only_host = {"schema", "name", "description", "references", "retry", "skip_batch", "hang"}
    renamed = {"detect": "detectors", "respond": "rules"}
    assert {renamed.get(name, name) for name in keys.keys() - only_host} == set(
        EngineConfig._fields
    )
    assert {each.kind for each in keys["clip"].tables} == {*RULES, "none"}  # type: ignore[attr-defined]
    assert {detector_of(cause) for cause in CAUSES} == set(DETECTORS)
    assert set(ACTIONS.values()) == set(Action)
    assert {*When._fields, "causes", "skip", "action"} == set(RuleConfig._fields)


def test_detectors_have_the_core_s_order_and_names_become_flags():
    tables = "".join(f"[detect.{name}]\n" for name in reversed([*DETECTORS]))
    found = loads(HEAD + tables).config().detectors
    assert [(name, type(config)) for name, config in found] == [*DETECTORS.items()]
    text = HEAD + '[detect.nonfinite]\n[[respond]]\nto = ["nonfinite"]\ndo = ["skip", "rollback"]\n'
    (rule,) = loads(text + "when = { consecutive = 3 }\n").config().rules
    assert rule == RuleConfig(causes=3, skip=True, action=int(Action.ROLLBACK), consecutive=3)


@pytest.mark.parametrize("table", sorted(all_tables(), key=str))
def test_every_key_is_declared(table):
    assert all(key.range or key.tables for key in keys_of(table).values())


def test_every_default_is_valid():
    for clip in keys_of(Policy)["clip"].tables:
        policy = Policy(
            1, "x", clip=clip(), detect=Detect(*(each() for each in DETECTORS.values()))
        )
        assert from_dict(to_dict(policy)) == policy


def test_floats_reach_the_core_as_float32_and_stay_what_they_were_in_the_policy():
    policy = loads(HEAD + '[clip]\nkind = "zclip"\nema_decay = 0.9700000001\n')
    assert isinstance(policy.clip, ZClipConfig)
    assert policy.clip.ema_decay == 0.9700000001
    decay = rounded(policy.clip).ema_decay
    assert type(decay) is float
    assert decay == float(np.float32(0.97)) != 0.97


def test_the_page_has_the_tables_of_the_present_code():
    assert key_tables.written(key_tables.PAGE) == key_tables.PAGE, (
        "run python -m tests.policy.key_tables"
    )
    tables = {table for _, found in key_tables.sections() for table in found}
    assert tables == all_tables() - {NoClip, Detect}, "a section for every table"
    section = key_tables.section_of(key_tables.PAGE, "`[[respond]]`")
    for name in (*CAUSES, *FAULTS, *ACTIONS, "skip"):
        assert f'"{name}"' in section


def test_the_examples_on_the_page_load_and_its_program_runs():
    for block in blocks("policies.md", "toml"):
        loads(block, source="docs/policies.md")
    names: dict[str, Any] = {}
    exec("".join(blocks("policies.md")), names)
    assert names["policy"].clip.kind == "fixed"
