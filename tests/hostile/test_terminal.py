"""No command prints text that a terminal would execute."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from healcore.tools.output import clean, clean_json
from tests.hostile import reader
from tests.hostile.test_events import EVENT
from tests.hostile.test_logs import ROWS

NASTY = "a\x1b]52;c;aGk=\x07b\x1b[2Jc\x9b31md\u202ee\u2066f\x7fg\u200bh"
EXECUTED = "\x1b\x07\x9b\u202e\u2066\x7f\u200b\x90\x9d"


def test_cleaned():
    assert clean("naïve 日本 🙂\u00a0x\n\ty") == "naïve 日本 🙂\u00a0x\n\ty"
    assert clean("a\x1b[31m\x9b\u202e\U000e0041\r") == r"a\x1b[31m\u009b\u202e\U000e0041\r"
    assert clean("a\nb", keep="") == r"a\nb"
    text = json.dumps({NASTY + "\U000e0041": "ü\n"}, ensure_ascii=False, indent=2)
    assert json.loads(clean_json(text)) == json.loads(text)
    assert not set(clean_json(text)) & set(EXECUTED)


def commands(folder: Path):
    """Every command that prints what is in a file."""
    events = folder / "run.events.jsonl"
    event = {"schema": 1, "seq": 1, "run": NASTY, "kind": NASTY, "step": 1, "problem": NASTY}
    text = json.dumps(event, ensure_ascii=False)
    events.write_bytes(EVENT + text.encode() + b"\n" + NASTY.encode() + b"\n")
    policy = folder / "p.toml"
    policy.write_text(
        'schema = 1\nname = "x\u202e"\ndescription = "a\u202eb\u009b"\nmode = "observe"\n'
    )
    wrong = folder / "wrong.toml"
    wrong.write_text('schema = 1\n"k\u202e\u009b" = 3\nmode = "\u202e"\n')
    log = folder / "log.csv"
    log.write_text(ROWS.replace("\n3,", f"\nx{NASTY},") + NASTY + ",1\n")
    named = folder / "n.pt"
    torch.save({NASTY: torch.tensor([float("nan")])}, named)
    yield "events", "show", events
    yield "report", events, "--out", folder / "out.html"
    yield "policy", "show", policy
    yield "replay", log, "--policy", policy
    yield "replay", log, "--policy", wrong
    yield "probe", "loss", log
    yield "probe", "checkpoint", named
    yield "probe", "checkpoint", folder / NASTY.replace("/", "")


@pytest.mark.parametrize("number", range(8))
def test_no_command_prints_what_a_terminal_executes(tmp_path, number):
    result = reader.run(*list(commands(tmp_path))[number])
    assert result.text
    assert not set(result.text) & set(EXECUTED), result.text
