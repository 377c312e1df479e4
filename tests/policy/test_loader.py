"""Every form of a policy, its overrides, and errors with file, key, value, rule and remedy."""

import contextlib
import pickle
from typing import Any, get_type_hints

import jax.numpy as jnp
import optax
import pytest
import torch

import healcore
from healcore.core.clipping import FixedConfig
from healcore.policy import (
    Overrides,
    Policy,
    PolicyError,
    diff,
    dumps,
    fingerprint,
    load,
    loads,
    preset_text,
)
from healcore.policy.loader import parse_overrides
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.trainer_access import trainer_access_of


def test_one_number_changes_and_the_rest_stays():
    given: Any = {"clip": {"max_norm": 1.5}, "detect": {"loss_spike": {"z_threshold": 9.0}}}
    policy = load("default", **given)
    found = {key: (left, right) for key, left, right in diff(load("default"), policy)}
    assert found == {
        "clip.kind": ("none", "fixed"),
        "clip.max_norm": (None, 1.5),
        "detect.loss_spike.z_threshold": (5.5, 9.0),
    }
    assert fingerprint(policy) != fingerprint(load("default"))
    host = HostPolicy.of("default", given)
    assert host.engine.fingerprint == fingerprint(policy)
    assert loads(host.text or "") == loads(dumps(policy)) == policy


def test_none_takes_a_limit_a_detector_or_all_clipping_away_and_lists_are_replaced():
    policy = load("zclip", detect={"plateau": {}}, respond=[{"to": ["plateau"], "do": ["alert"]}])
    assert policy.detect.plateau is not None
    assert [each.to for each in policy.respond] == [("plateau",)]
    assert load("zclip", clip={"max_norm": None}).clip.max_norm is None  # type: ignore[union-attr]
    assert load("default", detect={"vanishing": None}, respond=[]).detect.vanishing is None
    assert load("default", clip=None).clip.kind == "none"
    same = load("default", clip={"max_norm": None}, budget={"recoveries": 3}, mode="heal")
    assert same == load("default")


def test_the_command_line_merges_into_the_own_tables_of_a_policy():
    base = load("zclip")
    cases = {
        "clip.max_norm=2": {"clip.max_norm": 2.0},
        "clip.max_norm=none": {"clip.max_norm": "none"},
        "clip.z_threshold=3": {"clip.z_threshold": 3},
        "clip.shift.patience=40": {"clip.shift.patience": 40},
        "lr.factor=0.25": {"lr.factor": 0.25},
    }
    for pair, changed in cases.items():
        policy = load(base, **parse_overrides([pair], "--set"))
        found = {key: right for key, _, right in diff(base, policy)}
        assert (found, policy.clip.kind) == (changed, "zclip")
    given = ["clip.max_norm=2", "clip.kind=fixed", "mode=observe"]
    policy = load(base, **parse_overrides(given, "--set"))
    assert (policy.clip, policy.mode) == (FixedConfig(2), "observe")
    assert load(base, **parse_overrides(["clip=none"], "--set")).clip.kind == "none"
    without = ["detect.nonfinite=none", "respond=[]"]
    assert load(base, **parse_overrides(without, "--set")).detect.nonfinite is None


@pytest.mark.parametrize(
    ("name", "pair", "lines"),
    [
        ("fixed-clip", "clip.z_threshold=3", "one of max_norm, kind"),
        ("zclip", "clip.limit=3", "one of z_threshold, ema_decay, warmup_steps, target"),
        ("zclip", "clip.zthreshold=3", "did you mean 'z_threshold'?"),
        ("zclip", "clipp.max_norm=3", "did you mean 'clip'?"),
        ("zclip", "max_skps=3", "did you mean 'max_skips'?"),
    ],
)
def test_a_key_that_a_policy_does_not_have_is_an_error_that_lists_those_it_has(name, pair, lines):
    with pytest.raises(PolicyError) as caught:
        load(name, **parse_overrides([pair], "--set"))
    assert lines in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "key", "value", "rule"),
    [
        pytest.param(
            {"clip": {"max_norm": -1}},
            "clip.max_norm",
            "-1",
            "greater than 0",
            id="outside of the range",
        ),
        pytest.param(
            {"clip": {"max_nrom": 1.0}},
            "clip.max_nrom",
            "1.0",
            "a key of this table",
            id="misspelled key",
        ),
        pytest.param({"clip": 1.0}, "clip", "1.0", "a table", id="no table"),
        pytest.param(
            {"detect": {"loss_spike": None}},
            "respond[",
            '"loss_spike"',
            "detector is on",
            id="a rule for a detector that is off",
        ),
    ],
)
def test_an_invalid_override_names_key_value_and_rule(overrides, key, value, rule):
    with pytest.raises(PolicyError) as caught:
        load("default", **overrides)
    problem = caught.value.problems[0]
    assert problem.key.startswith(key)
    assert (problem.value, rule in problem.rule) == (value, True)
    assert f"with {next(iter(overrides))} given as keywords" in str(caught.value)


def test_the_keywords_are_the_keys_of_a_file():
    assert set(get_type_hints(Overrides)) == {*Policy._fields} - {"schema"}


def policy_of(engine):
    return engine.to_dict(engine.init())["policy"]


def by_attach(policy, **overrides):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    return policy_of(healcore.torch.attach(optimizer, policy, **overrides).engine)


def by_protect(policy, **overrides):
    tx = healcore.jax.protect(optax.sgd(0.1), policy, **overrides)
    policy = load(policy, **overrides) if overrides else policy
    return healcore.jax.to_dict(tx.init({"w": jnp.ones(2)}), policy)["policy"]


def by_healer(policy, **overrides):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    unused = contextlib.suppress(healcore.errors.IncompleteRun)  # it takes no step
    with unused, healcore.Healer(policy, state=state, **overrides) as healer:
        (found,) = trainer_access_of(healer).driver.engines().values()
    return found["policy"]


@pytest.mark.parametrize("take", [by_attach, by_protect, by_healer])
def test_every_form_is_the_same_policy(take, tmp_path):
    """Functions take a preset, a path, a policy, an engine and its configuration."""
    path = tmp_path / "mine.toml"
    path.write_text(preset_text("default"))
    policy = load("default")
    wanted = load("default", clip={"max_norm": 1.5}).engine()
    for form in (str(path), path, policy) if take is by_healer else ("default",):
        assert take(form) == policy_of(policy.engine())
        assert take(form, clip={"max_norm": 1.5}) == policy_of(wanted)
    for engine in (policy.engine(), policy.config())[: 2 if take is by_healer else 1]:
        assert take(engine) == policy_of(policy.engine())
        with pytest.raises(PolicyError, match="keyword"):
            take(engine, clip={"max_norm": 1.5})
    with pytest.raises(PolicyError, match="preset"):
        take(7)


def by_start(policy, **options):
    return healcore.start(policy, state={}, **options)


def test_a_misspelled_argument_is_an_error_that_names_it():
    for take in (by_healer, by_start, by_attach, by_protect):
        with pytest.raises(PolicyError, match=r"los_fn.*\n.*an argument of the function"):
            take("default", los_fn=None)


def test_a_misspelled_preset_is_told_the_name_without_the_names_of_the_others():
    with pytest.raises(PolicyError, match=r"write: +did you mean 'default'\?") as error:
        load("defualt")
    assert "zclip-paper" not in str(error.value)
    with pytest.raises(PolicyError, match=r"one of default, .*zclip-paper"):
        load("quite another")


def test_a_misspelled_key_is_told_the_key():
    for take in (by_healer, by_start, by_attach, by_protect):
        with pytest.raises(PolicyError, match=r"clipp = .*\n.*\n.*did you mean 'clip'\?"):
            take("default", clipp={"max_norm": 1.0})


HEAD = 'schema = 1\nname = "x"\n'
ZCLIP = HEAD + '[clip]\nkind = "zclip"\n'


def rule(to: str, do: str, when: str = "", more: str = "detect.nonfinite = {}") -> str:
    condition = f"when = {{ {when} }}\n" if when else ""
    return f"{HEAD}{more}\n[[respond]]\nto = {to.split()}\ndo = {do.split()}\n{condition}"


WRONG = {
    "no schema": ('name = "x"\n', "schema", "policies.md"),
    "another schema": ("schema = 2\n", "schema", "upgrade"),
    "unknown key": (ZCLIP + "z_treshold = 2.0\n", "clip.z_treshold", "z_threshold"),
    "another clip's key": (
        HEAD + 'clip = { kind = "fixed", target = "max" }', "clip.target", "max_norm",
    ),
    "nan": (ZCLIP + "z_threshold = nan\n", "clip.z_threshold", "2.5"),
    "1 as a float32": (ZCLIP + "ema_decay = 0.99999999999\n", "clip.ema_decay", "0.97"),
    "float for a whole number": (ZCLIP + "warmup_steps = 30.0\n", "clip.warmup_steps", "25"),
    "unknown mode": (HEAD + 'mode = "heel"\n', "mode", "heal"),
    "a table that is a number": (HEAD + "clip = 3\n", "clip", "[clip]"),
    "no cause": (HEAD + 'respond = [{ do = ["skip"] }]', "respond[0].to", "policies.md"),
    "unknown cause": (rule("nan", "skip"), "respond[0].to[0]", "one of"),
    "no detector": (rule("divergence", "alert"), "respond[0].to[0]", "[detect.divergence]"),
    "count without within": (
        rule("nonfinite", "skip", "count = 3"), "respond[0].when.count", "within",
    ),
    "floor above the first cut": (HEAD + "lr.floor = 0.6\n", "lr.floor", "floor = 0.5"),
    "sustained after the escape": (
        HEAD + "detect.grad_ema.sustain = 26\n", "detect.grad_ema.sustain", "sustain = 25",
    ),
    "a fault and a cause": (rule("oom nonfinite", "save"), "respond[0].to[1]", "separate"),
    "a condition of a fault": (rule("oom", "save", "consecutive = 2"), "respond[0].when", "drop"),
    "no TOML": ("schema = = 1\n", "", "place"),
    "brackets without end": (f"schema = {'[' * 5000}\n", "", "place"),
}  # fmt: skip
"""Document, the key of the problem, and a word of what to write."""


@pytest.mark.parametrize("case", WRONG)
def test_the_message_names_the_key_the_rule_and_the_correction(case):
    document, key, write = WRONG[case]
    with pytest.raises(PolicyError) as caught:
        loads(document, source="runs/my.toml")
    error = caught.value
    assert error.source == "runs/my.toml"
    assert not error.unreadable
    problem = next(p for p in error.problems if p.key == key)
    assert write in problem.write
    assert all(part in str(error) for part in (error.source, key, problem.rule, problem.write))


def test_all_problems_are_reported_at_once():
    text = ZCLIP + "z_threshold = nan\nwarmup = 3\n[lr]\nfactor = 2\n"
    with pytest.raises(PolicyError, match="3 problems") as caught:
        loads(text)
    keys = {p.key for p in caught.value.problems}
    assert keys == {"clip.z_threshold", "clip.warmup", "lr.factor"}
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.problems) == (str(caught.value), caught.value.problems)


def test_what_cannot_be_read_has_a_clear_message(tmp_path):
    binary, large = tmp_path / "weights.toml", tmp_path / "large.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    large.write_bytes(b"#" * (1 << 21))
    messages: dict[Any, str] = {
        "agressive": "aggressive",
        "no/such.toml": "No such file",
        "nul\0.toml": "null byte",
        "/": "directory",
        3: "from_dict",
        binary: "can't decode byte",
        large: "limit",
    }
    for wanted, word in messages.items():
        with pytest.raises(PolicyError, match=word):
            load(wanted)
