"""A policy that cannot work fails at load; the message has file, key, value, rule and remedy."""

from __future__ import annotations

import pickle

import pytest

from healcore.policy import PolicyError, load, loads

HEAD = 'schema = 1\nname = "x"\n'
ZCLIP = HEAD + '[clip]\nkind = "zclip"\n'
NONFINITE = HEAD + "[detect.nonfinite]\n[[respond]]\n"


def rule(to: list[str], do: list[str]) -> str:
    return f"{NONFINITE}to = {to}\ndo = {do}\n"


RULE = NONFINITE + 'to = ["nonfinite"]\ndo = ["skip"]\n'

WRONG = {
    "no schema": ('name = "x"\n', "schema", "schema = 1"),
    "another schema": ("schema = 2\n", "schema", "upgrade"),
    "empty name": ('schema = 1\nname = " "\n', "name", "mine"),
    "unknown detector": (HEAD + "[detect.los_spike]\n", "detect.los_spike", "loss_spike"),
    "unknown key": (ZCLIP + "z_treshold = 2.0\n", "clip.z_treshold", "z_threshold"),
    "key without resemblance": (HEAD + "[lr]\nxyz = 2\n", "lr.xyz", "factor"),
    "key of another kind of clip": (
        HEAD + '[clip]\nkind = "fixed"\ntarget = "max"\n', "clip.target", "max_norm",
    ),
    "odd key": (HEAD + '"a.b" = 1\n', '"a.b"', "schema"),
    "nan": (ZCLIP + "z_threshold = nan\n", "clip.z_threshold", "2.5"),
    "1 as a float32": (ZCLIP + "ema_decay = 0.99999999999\n", "clip.ema_decay", "0.97"),
    "too large for a float32": (ZCLIP + "z_threshold = 1e39\n", "clip.z_threshold", "2.5"),
    "a whole number no float holds": (
        ZCLIP + f"z_threshold = 1{'0' * 400}\n", "clip.z_threshold", "2.5",
    ),
    "float for a whole number": (ZCLIP + "warmup_steps = 30.0\n", "clip.warmup_steps", "30"),
    "bool for a whole number": (ZCLIP + "warmup_steps = true\n", "clip.warmup_steps", "25"),
    "no such limit name": (ZCLIP + 'max_norm = "off"\n', "clip.max_norm", "1.0"),
    "unknown mode": (HEAD + 'mode = "heel"\n', "mode", "heal"),
    "clip without a kind": (HEAD + "[clip]\n", "clip.kind", "zclip"),
    "a table that is a number": (HEAD + "clip = 3\n", "clip", "[clip]"),
    "one rule instead of several": (HEAD + "[respond]\n", "respond", "[[respond]]"),
    "a rule without a cause": (NONFINITE + 'do = ["skip"]\n', "respond[0].to", "to = ["),
    "unknown cause": (NONFINITE + 'to = ["nan"]\ndo = ["skip"]\n', "respond[0].to[0]", "one of"),
    "the same action twice": (
        NONFINITE + 'to = ["nonfinite"]\ndo = ["skip", "skip"]\n', "respond[0].do[1]", "drop",
    ),
    "cause without its detector": (
        HEAD + '[[respond]]\nto = ["divergence"]\ndo = ["alert"]\n',
        "respond[0].to[0]", "[detect.divergence]",
    ),
    "rollback without a budget": (
        HEAD + "[budget]\nrecoveries = 0\n[detect.nonfinite]\n[[respond]]\n"
        'to = ["nonfinite_grad"]\ndo = ["skip", "rollback"]\n',
        "respond[0].do[1]", "budget.recoveries = 3",
    ),
    "count without within": (RULE + "when = { count = 3 }\n", "respond[0].when.count", "within"),
    "more hits than steps": (
        RULE + "when = { count = 9, within = 5 }\n", "respond[0].when.count", "count = 5",
    ),
    "floor above the first cut": (HEAD + "[lr]\nfloor = 0.6\n", "lr.floor", "floor = 0.5"),
    "sustained after the escape": (
        HEAD + "[detect.grad_ema]\nsustain = 26\n", "detect.grad_ema.sustain", "sustain = 25",
    ),
    "two detectors of one cause, one named": (
        HEAD + '[detect.loss_spike]\n[detect.loss_ratio]\n[[respond]]\nto = ["loss_spike"]\n'
        'do = ["skip"]\n',
        "respond[0].to[0]", "loss_ratio",
    ),
    "a fault and a cause": (rule(["oom", "nonfinite"], ["save"]), "respond[0].to[1]", "separate"),
    "an action of a cause for a fault": (rule(["oom"], ["rollback"]), "respond[0].do[0]", "drop"),
    "a condition of a fault": (
        rule(["oom"], ["save"]) + "when = { consecutive = 2 }\n", "respond[0].when", "drop",
    ),
    "no budget for smaller parts": (
        rule(["oom"], ["shrink_microbatch"]) + "[budget]\nshrinks = 0\n", "respond[0].do[0]",
        "budget.shrinks = 3",
    ),
    "a first wait above all waits": (
        HEAD + "[retry]\nbase_delay_s = 90\n", "retry.base_delay_s", "60",
    ),
    "more in a row than in total": (
        HEAD + "[skip_batch]\ncount = 2\n", "skip_batch.consecutive", "= 2",
    ),
    "no TOML": ("schema = = 1\n", "", "place"),
    "a number without end": (f"schema = {'9' * 5000}\n", "", "place"),
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


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        ("agressive", "aggressive"),
        ("something", "pretraining"),
        ("no/such.toml", "No such file"),
        ("nul\0.toml", "null byte"),
        ("/", "directory"),
        (3, "from_dict"),
        ({"schema": 1}, "from_dict"),
    ],
)
def test_what_cannot_be_read_has_a_clear_message(wanted, word):
    with pytest.raises(PolicyError, match=word):
        load(wanted)


def test_files_that_are_no_policies(tmp_path):
    binary = tmp_path / "weights.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="not UTF-8 at byte 0"):
        load(binary)
    large = tmp_path / "large.toml"
    large.write_text("# " + "x" * (1 << 20))
    with pytest.raises(PolicyError, match="limit"):
        load(str(large))
