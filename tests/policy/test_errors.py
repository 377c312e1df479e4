"""A policy that cannot work fails at load; the message has file, key, value, rule and remedy."""

from __future__ import annotations

import pytest

from healcore.policy import PolicyError, from_dict, load, loads

HEAD = 'schema = 1\nname = "x"\n'
ZCLIP = HEAD + '[clip]\nkind = "zclip"\n'
NONFINITE = HEAD + "[detect.nonfinite]\n[[respond]]\n"

# (document, key, value, part of the rule, part of what to write)
WRONG = {
    "no schema": ('name = "x"\n', "schema", "", "missing", "schema = 1"),
    "another schema": ("schema = 2\n", "schema", "2", "version of the file format", "upgrade"),
    "schema as a string": ('schema = "1"\nname = "x"\n', "schema", '"1"', "1", "schema = 1"),
    "no name": ("schema = 1\n", "name", "", "missing", 'name = "mine"'),
    "empty name": ('schema = 1\nname = " "\n', "name", '" "', "non-empty", 'name = "mine"'),
    "unknown table": (HEAD + "[detct]\n", "detct", "{}", "a key", "did you mean 'detect'"),
    "unknown detector": (
        HEAD + "[detect.los_spike]\n", "detect.los_spike", "{}", "a key", "'loss_spike'",
    ),
    "unknown key": (
        ZCLIP + "z_treshold = 2.0\n", "clip.z_treshold", "2.0", "a key", "'z_threshold'",
    ),
    "key in the wrong table": (
        HEAD + "recoveries = 2\n", "recoveries", "2", "a key", "under [budget]",
    ),
    "key without resemblance": (
        HEAD + "[lr]\nxyz = 2\n", "lr.xyz", "2", "a key", "one of factor, floor",
    ),
    "key of another kind of clip": (
        HEAD + '[clip]\nkind = "fixed"\ntarget = "max"\n', "clip.target", '"max"', "a key", "zclip",
    ),
    "odd key": (HEAD + '"a.b" = 1\n', '"a.b"', "1", "a key", "one of schema"),
    "nan": (ZCLIP + "z_threshold = nan\n", "clip.z_threshold", "nan", "finite", "= 2.5"),
    "inf": (ZCLIP + "max_norm = inf\n", "clip.max_norm", "inf", "finite", "max_norm = 1.0"),
    "negative": (ZCLIP + "z_threshold = -1\n", "clip.z_threshold", "-1", "above 0", "= 2.5"),
    "at the end of an open range": (
        ZCLIP + "ema_decay = 1.0\n", "clip.ema_decay", "1.0", "below 1", "= 0.97",
    ),
    "1 as a float32": (
        ZCLIP + "ema_decay = 0.99999999999\n", "clip.ema_decay", "0.99999999999",
        "after rounding to float32, here 1.0", "= 0.97",
    ),
    "too large for a float32": (
        ZCLIP + "z_threshold = 1e39\n", "clip.z_threshold", "1e+39", "float32", "= 2.5",
    ),
    "too small for a float32": (
        ZCLIP + "min_rel_std = 1e-60\n", "clip.min_rel_std", "1e-60", "float32", "= 0.01",
    ),
    "a whole number no float holds": (
        ZCLIP + f"z_threshold = 1{'0' * 400}\n", "clip.z_threshold", "1000", "finite", "= 2.5",
    ),
    "string for a number": (
        ZCLIP + 'z_threshold = "2.5"\n', "clip.z_threshold", '"2.5"', "number", "= 2.5",
    ),
    "bool for a number": (
        ZCLIP + "z_threshold = true\n", "clip.z_threshold", "true", "number", "= 2.5",
    ),
    "date for a number": (
        ZCLIP + "z_threshold = 2020-01-01\n", "clip.z_threshold", "date(2020", "number", "= 2.5",
    ),
    "float for a whole number": (
        ZCLIP + "warmup_steps = 30.0\n", "clip.warmup_steps", "30.0", "whole", "warmup_steps = 30",
    ),
    "bool for a whole number": (
        ZCLIP + "warmup_steps = true\n", "clip.warmup_steps", "true", "whole", "= 25",
    ),
    "whole number out of range": (
        ZCLIP + "warmup_steps = 0\n", "clip.warmup_steps", "0", "from 1", "= 25",
    ),
    "number for a bool": (
        NONFINITE + 'to = ["nonfinite"]\ndo = ["skip"]\nwhen = { sustained = 1 }\n',
        "respond[0].when.sustained", "1", "true or false", "sustained = false",
    ),
    "no such limit name": (
        ZCLIP + 'max_norm = "off"\n', "clip.max_norm", '"off"', 'or "none"', "max_norm = 1.0",
    ),
    "unknown mode": (HEAD + 'mode = "heel"\n', "mode", '"heel"', '"heal"', 'mode = "heal"'),
    "unknown target": (
        ZCLIP + 'target = "avg"\n', "clip.target", '"avg"', '"mean"', 'target = "reciprocal"',
    ),
    "clip without a kind": (HEAD + "[clip]\n", "clip.kind", "", "zclip", 'kind = "zclip"'),
    "unknown kind of clip": (
        HEAD + '[clip]\nkind = "adagcc"\n', "clip.kind", '"adagcc"', '"adagc"', 'kind = "adagc"',
    ),
    "a table that is a number": (HEAD + "clip = 3\n", "clip", "3", "a table", "[clip]"),
    "a detector that is a bool": (
        HEAD + "detect = { plateau = true }\n", "detect.plateau", "true", "a table",
        "[detect.plateau]",
    ),
    "one rule instead of several": (
        HEAD + "[respond]\n", "respond", "{}", "an array of tables", "[[respond]]",
    ),
    "rules that are numbers": (HEAD + "respond = [1]\n", "respond[0]", "1", "table", "[[respond]]"),
    "a rule without a cause": (
        NONFINITE + 'do = ["skip"]\n', "respond[0].to", "", "missing", "to = [",
    ),
    "an empty rule": (
        NONFINITE + 'to = []\ndo = ["skip"]\n', "respond[0].to", "[]", "non-empty", "to = [",
    ),
    "unknown cause": (
        NONFINITE + 'to = ["nonfinite", "nan"]\ndo = ["skip"]\n',
        "respond[0].to[1]", '"nan"', "nonfinite_loss", "one of these",
    ),
    "unknown action": (
        NONFINITE + 'to = ["nonfinite"]\ndo = ["roll_back"]\n',
        "respond[0].do[0]", '"roll_back"', '"rollback"', '"rollback"',
    ),
    "the same action twice": (
        NONFINITE + 'to = ["nonfinite"]\ndo = ["skip", "skip"]\n',
        "respond[0].do[1]", '"skip"', "once", "drop",
    ),
    "a reference that is a number": (
        HEAD + "references = [1]\n", "references[0]", "1", "non-empty string", "string in quotes",
    ),
    "cause without its detector": (
        HEAD + '[[respond]]\nto = ["divergence"]\ndo = ["alert"]\n',
        "respond[0].to[0]", '"divergence"', "lacks [detect.divergence]", "[detect.divergence]",
    ),
    "rollback without a budget": (
        HEAD + "[detect.nonfinite]\n[budget]\nrecoveries = 0\n[[respond]]\n"
        'to = ["nonfinite_grad"]\ndo = ["skip", "rollback"]\n',
        "respond[0].do[1]", '"rollback"', "budget.recoveries is 0", "budget.recoveries = 3",
    ),
    "cut without a budget": (
        HEAD + '[detect.nonfinite]\n[budget]\nlr_cuts = 0\n[[respond]]\nto = ["nonfinite"]\n'
        'do = ["cut_lr"]\n',
        "respond[0].do[0]", '"cut_lr"', "budget.lr_cuts is 0", "budget.lr_cuts = 3",
    ),
    "count without within": (
        NONFINITE + 'to = ["nonfinite"]\ndo = ["skip"]\nwhen = { count = 3 }\n',
        "respond[0].when.count", "3", "together with within", "within = 100",
    ),
    "within without count": (
        NONFINITE + 'to = ["nonfinite"]\ndo = ["skip"]\nwhen = { within = 30 }\n',
        "respond[0].when.within", "30", "together with count", "count = 5",
    ),
    "more hits than steps": (
        NONFINITE + 'to = ["nonfinite"]\ndo = ["skip"]\nwhen = { count = 9, within = 5 }\n',
        "respond[0].when.count", "9", "at most within", "count = 5",
    ),
    "floor above the first cut": (
        HEAD + "[lr]\nfloor = 0.6\n", "lr.floor", "0.6", "at most factor", "floor = 0.5",
    ),
    "sustained after the escape": (
        HEAD + "[detect.grad_ema]\nsustain = 26\n", "detect.grad_ema.sustain", "26",
        "at most shift.patience", "sustain = 25",
    ),
    "a ceiling above the rate that broke the run": (
        HEAD + "[lr]\nceiling = 1.5\n", "lr.ceiling", "1.5", "at most 1", "ceiling = 0.0",
    ),
    "a margin below the last record": (
        HEAD + "[detect.instability]\ngrowth = -0.1\n", "detect.instability.growth", "-0.1",
        "at least 0", "= 0.25",
    ),
    "one record is no growth": (
        HEAD + "[detect.instability]\nrecords = 1\n", "detect.instability.records", "1",
        "from 2", "records = 3",
    ),
    "a number for a question": (
        HEAD + "[rollback]\nconfirm = 1\n", "rollback.confirm", "1", "true or false",
        "confirm = false",
    ),
    "loss ratio of 1": (
        HEAD + "[detect.loss_ratio]\nratio = 1.0\n", "detect.loss_ratio.ratio", "1.0",
        "above 1", "= 2.0",
    ),
    "a warm-up that never ends": (
        HEAD + "[detect.loss_ratio]\nwindow = 10\n", "detect.loss_ratio.warmup_steps", "25",
        "at most window", "warmup_steps = 10",
    ),
    "sustained after the level has moved": (
        HEAD + "[detect.loss_ratio]\nsustain = 26\n", "detect.loss_ratio.sustain", "26",
        "at most escape", "sustain = 25",
    ),
    "a window that is shorter than its warm-up": (
        HEAD + "[detect.grad_window]\nwindow = 32\n", "detect.grad_window.warmup_steps", "64",
        "at most window", "warmup_steps = 32",
    ),
    "an average without a test": (
        HEAD + '[detect.grad_ema]\nratio = "none"\n', "detect.grad_ema.ratio", "none",
        "sigmas", "ratio = 20.0",
    ),
    "an average's spike sustained too late": (
        HEAD + "[detect.grad_ema]\nsustain = 26\n", "detect.grad_ema.sustain", "26",
        "at most shift.patience", "sustain = 25",
    ),
    "a norm's ceiling nowhere": (
        HEAD + '[detect.grad_ceiling]\nfirst_ratio = "none"\n', "detect.grad_ceiling.ceiling",
        "none", "first_ratio", "ceiling = 100.0",
    ),
    "a norm's ceiling sustained too late": (
        HEAD + "[detect.grad_ceiling]\nsustain = 101\n", "detect.grad_ceiling.sustain", "101",
        "at most escape", "sustain = 100",
    ),
    "a ceiling nowhere": (
        HEAD + "[detect.loss_ceiling]\nfirst_steps = 0\n", "detect.loss_ceiling.ceiling",
        "none", "first_steps", "ceiling = 5.0",
    ),
    "two detectors of one cause, one named": (
        HEAD + '[detect.loss_spike]\n[detect.loss_ratio]\n[[respond]]\nto = ["loss_spike"]\n'
        'do = ["skip"]\n',
        "respond[0].to[0]", '"loss_spike"', "[detect.loss_ratio]", '"loss_spike", "loss_ratio"',
    ),
    "no TOML": ("schema = = 1\n", "", "", "TOML", "at that place"),
    "the same key twice": ("schema = 1\nschema = 1\n", "", "", "TOML", "at that place"),
    "no such day": ("schema = 2020-13-45\n", "", "", "TOML", "at that place"),
    "a number without end": (f"schema = {'9' * 5000}\n", "", "", "TOML", "at that place"),
    "brackets without end": (f"schema = {'[' * 5000}\n", "", "nested", "TOML", "at that place"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_the_message_names_the_key_the_rule_and_the_correction(case):
    document, key, value, rule, write = WRONG[case]
    with pytest.raises(PolicyError) as caught:
        loads(document, source="runs/my.toml")
    error = caught.value
    assert error.source == "runs/my.toml"
    assert not error.unreadable
    problem = next(p for p in error.problems if p.key == key)
    assert problem.value.startswith(value) or value in problem.value
    assert rule in problem.rule
    assert write in problem.write
    message = str(error)
    assert message.startswith("policy runs/my.toml: ")
    assert all(part in message for part in (key, problem.rule, problem.write))


def test_a_syntax_error_names_line_and_column():
    with pytest.raises(PolicyError, match=r"line 3, column 8"):
        loads("schema = 1\nname = 'x'\nmode = =\n")


def test_all_problems_are_reported_at_once():
    text = ZCLIP + "z_threshold = nan\nwarmup = 3\n[lr]\nfactor = 2\n"
    with pytest.raises(PolicyError, match="3 problems") as caught:
        loads(text)
    assert {p.key for p in caught.value.problems} == {
        "clip.z_threshold",
        "clip.warmup",
        "lr.factor",
    }


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("agressive", "did you mean 'aggressive'"),
        ("something", "default, pretraining, aggressive, conservative, observe, zclip"),
        ("no/such.toml", "No such file or directory"),
        ("nul\0.toml", "null byte"),
        ("/", "Is a directory"),
        ("", "one of default"),
        (3, "from_dict"),
        (None, "from_dict"),
        ({"schema": 1}, "from_dict"),
    ],
)
def test_what_cannot_be_read_has_a_clear_message(wanted, message):
    with pytest.raises(PolicyError) as caught:
        load(wanted)
    assert message in str(caught.value)


def test_files_that_are_no_policies(tmp_path):
    binary = tmp_path / "weights.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PolicyError, match="not UTF-8 at byte 0"):
        load(binary)
    large = tmp_path / "large.toml"
    large.write_text("# " + "x" * (1 << 20))
    with pytest.raises(PolicyError, match="larger than"):
        load(str(large))


def test_the_file_is_named(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("schema = 1\n")
    with pytest.raises(PolicyError, match=r"mine\.toml: 1 problem"):
        load(file)


@pytest.mark.parametrize("data", [None, 3, [], "schema = 1", {1: 2}, {"schema": True}])
def test_from_dict_takes_only_policies(data):
    with pytest.raises(PolicyError):
        from_dict(data)


def test_text_has_to_be_text():
    with pytest.raises(PolicyError, match=r"text\.decode"):
        loads(b"schema = 1")  # type: ignore[arg-type]


def test_errors_survive_pickling():
    import pickle

    with pytest.raises(PolicyError) as caught:
        loads("schema = 1\n", source="a.toml")
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert again.problems == caught.value.problems
