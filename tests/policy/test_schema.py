"""The tables of a policy file match the core's configs, and docs/policies.md lists every key."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from pydantic_core import PydanticUndefined

from healcore.core.clipping import RULES
from healcore.core.detectors import CAUSES, DETECTORS
from healcore.core.engine import EngineConfig, RuleConfig
from healcore.core.verdict import Action
from healcore.policy import Policy, load, loads
from healcore.policy.clip import KINDS, Shift, ZClip
from healcore.policy.detect import Detect
from healcore.policy.document import detector_of
from healcore.policy.respond import ACTIONS, Respond, When
from healcore.policy.table import NONE, Table

HEAD = 'schema = 1\nname = "x"\n'


def all_tables() -> set[type[Table]]:
    """Every table class of the format."""
    found, open_ = set(), [Policy]
    while open_:
        table = open_.pop()
        if table in found:
            continue
        found.add(table)
        for field in table.model_fields.values():
            open_ += tables_in(field.annotation)
    return found


def tables_in(annotation) -> list[type[Table]]:
    if isinstance(annotation, type) and issubclass(annotation, Table):
        return [annotation]
    return [table for part in typing.get_args(annotation) for table in tables_in(part)]


WITH_CORE = sorted((table for table in all_tables() if table.core), key=lambda t: t.__name__)


@pytest.mark.parametrize("table", WITH_CORE, ids=lambda t: t.__name__)
def test_same_fields_and_defaults_as_the_core(table):
    core = table.core()
    assert set(table.model_fields) - {"kind"} - table.host_only == set(core._fields)
    assert table.host_only <= set(table.model_fields)
    values = (
        {"kind": next(k for k, t in KINDS.items() if t is table)}
        if "kind" in table.model_fields
        else {}
    )
    # The core's own defaults, rounded: what an empty table in a file gives.
    assert table(**values).config() == type(core)(*map(rounded, core))


def rounded(value):
    if isinstance(value, float):
        return float(np.float32(value))
    return type(value)(*map(rounded, value)) if isinstance(value, tuple) else value


def test_every_rule_detector_and_action_of_the_core_can_be_written():
    assert set(KINDS) == {*RULES, "none"}
    assert list(Detect.model_fields) == list(DETECTORS)
    assert {detector_of(cause) for cause in CAUSES} == set(DETECTORS)
    assert set(ACTIONS.values()) == set(Action)
    assert set(When.model_fields) | {"causes", "skip", "action"} == set(RuleConfig._fields)


def test_every_part_of_the_engine_config_is_filled():
    text = {"schema_version", "name", "description", "references"}
    policy = set(Policy.model_fields) - text - Policy.host_only
    renamed = {"detect": "detectors", "respond": "rules"}
    assert {renamed.get(name, name) for name in policy} == set(EngineConfig._fields)


@pytest.mark.parametrize("name", DETECTORS)
def test_detector_tables_reach_their_detector(name):
    ((got, config),) = loads(f"{HEAD}[detect.{name}]\n").config().detectors
    assert got == name
    assert type(config) is DETECTORS[name]


@pytest.mark.parametrize("kind", RULES)
def test_clip_tables_reach_their_rule(kind):
    clip = loads(f'{HEAD}[clip]\nkind = "{kind}"\n').config().clip
    assert clip is not None
    got, config = clip
    assert got == kind
    assert config.init(groups=2) is not None


def test_no_clip_table_is_no_clipping():
    assert loads(HEAD).config().clip is None
    assert loads(HEAD + '[clip]\nkind = "none"\n') == loads(HEAD)


def test_detectors_run_in_the_core_s_order_whatever_the_file_s():
    text = HEAD + "[detect.update_spike]\n[detect.nonfinite]\n"
    assert [name for name, _ in loads(text).config().detectors] == ["nonfinite", "update_spike"]


def test_floats_reach_the_core_as_float32_and_stay_what_they_were_in_the_policy():
    policy = loads(HEAD + '[clip]\nkind = "zclip"\nema_decay = 0.9700000001\n')
    assert isinstance(policy.clip, ZClip)
    assert policy.clip.ema_decay == 0.9700000001
    decay = policy.clip.config().ema_decay
    assert type(decay) is float
    assert decay == float(np.float32(0.97)) != 0.97


def test_names_become_flags():
    text = HEAD + '[detect.nonfinite]\n[[respond]]\nto = ["nonfinite"]\ndo = ["skip", "rollback"]\n'
    (rule,) = loads(text + "when = { consecutive = 3 }\n").config().rules
    assert rule == RuleConfig(causes=3, skip=True, action=int(Action.ROLLBACK), consecutive=3)


def test_a_policy_is_frozen_hashable_and_loads_to_itself():
    policy = load("default")
    with pytest.raises(ValueError, match="frozen"):
        policy.name = "other"
    assert load(policy) is policy
    assert hash(policy) == hash(load("default"))
    assert policy == load("default") != load("observe")


PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()


def headings() -> Iterator[tuple[str, type[Table]]]:
    """Every table as the page heads it."""
    yield "Top of the file", Policy
    for kind, table in KINDS.items():
        if kind != NONE:
            yield f'`[clip]` with `kind = "{kind}"`', table
    yield "`[….shift]`", Shift
    for name in ("incident", "rollback", "lr", "budget", "retry", "skip_batch", "hang"):
        yield f"`[{name}]`", tables_in(Policy.model_fields[name].annotation)[0]
    detect = tables_in(Policy.model_fields["detect"].annotation)[0]
    for name, field in detect.model_fields.items():
        yield f"`[detect.{name}]`", tables_in(field.annotation)[0]
    yield "`[[respond]]`", Respond
    yield "`when`", When


def rows(table: type[Table]) -> Iterator[str]:
    """The first three cells of each key's row."""
    for name, field in table.model_fields.items():
        if tables_in(field.annotation) or name == "kind":
            continue
        default, rule = field.default, field.metadata[0].rule
        if default is PydanticUndefined:
            shown = "required"
        elif default is None:
            shown = f'`"{NONE}"`'
        elif isinstance(default, bool):
            shown = f"`{str(default).lower()}`"
        elif isinstance(default, tuple):
            shown = "`[]`"
        else:
            shown = f'`"{default}"`' if isinstance(default, str) else f"`{default}`"
        yield f"| `{field.alias or name}` | {shown} | {rule} |"


@pytest.mark.parametrize(
    ("heading", "table"), list(headings()), ids=lambda x: x if type(x) is str else ""
)
def test_every_key_is_in_its_section(heading, table):
    assert f"## {heading}\n" in PAGE
    section = re.split(r"^#+ ", PAGE.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.M)[0]
    wanted = list(rows(table))
    missing = "\n".join(row for row in wanted if row not in section)
    assert not missing, f"write in docs/policies.md under {heading}:\n{missing}"
    assert sum(line.startswith("| `") for line in section.splitlines()) == len(wanted)


def test_the_examples_on_the_page_load():
    blocks = re.findall(r"^```toml\n(.*?)^```", PAGE, flags=re.M | re.S)
    assert blocks
    for block in blocks:
        loads(block, source="docs/policies.md")
