"""Logs, events and other texts that commands read: bombs, loops, damage, control characters."""

import gzip
import json
import os
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c
from torch.utils.tensorboard import SummaryWriter

from healcore.core.errors import clean
from healcore.policy import PolicyError, load
from tests.hostile import reader

ROWS = "step,loss\n" + "".join(f"{step},{1 / (step + 1)}\n" for step in range(50))
EVENT = json.dumps({"schema": 1, "seq": 0, "run": "r", "kind": "start", "step": 0}).encode() + b"\n"
LOGS = {
    "a header of one long cell": b"step,loss," + b"x" * 200_000 + b"\n1,2\n",
    "a million columns": b"step,loss" + b",x" * 400_000 + b"\n1,2\n",
    "a gz": gzip.compress(ROWS.encode()),
    "nested JSON": b'{"step": 1, "loss": ' + b"[" * 500_000 + b"\n",
    "a line without end": b'{"step": 1, "loss": "' + b"x" * 40_000_000,
    "a number of 400,000 digits": b'{"step": 1, "loss": ' + b"9" * 400_000 + b"}\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_none(tmp_path, name):
    path = tmp_path / "log"
    path.write_bytes(LOGS[name])
    assert reader.probe("loss", path).status == 3


def tensorboard(rows: int) -> bytes:
    """A file of TensorBoard with so many losses."""
    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as board:
            for step in range(rows):
                board.add_scalar("loss", 1 / (step + 1), step)
        (file,) = Path(folder).iterdir()
        return file.read_bytes()


def test_a_record_of_tensorboard_without_end(tmp_path):
    length = struct.pack("<Q", 1 << 63)
    endless = length + struct.pack("<I", masked_crc32c(length)) + b"x"
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(tensorboard(50) + endless)
    result = reader.probe("loss", path)
    assert result.status in (0, 1)
    assert "truncated or damaged" in reader.run("replay", path).text


def test_events_before_and_behind_a_line_that_is_none_are_read(tmp_path):
    digits = EVENT.replace(b'"seq": 0', b'"seq": ' + b"9" * 100_000)
    path = tmp_path / "run.events.jsonl"
    with path.open("wb") as file:
        file.write(EVENT + b"[" * 500_000 + b"\n" + digits)
        file.seek(20 << 20, os.SEEK_CUR)  # a line of many bytes, a hole that takes no disk
        file.write(b"x\n" + EVENT.replace(b'"seq": 0', b'"seq": 1'))
    outcome = reader.run("events", "show", path)
    assert (outcome.status, outcome.out.count("start")) == (1, 2)
    assert "longer than" in outcome.text


NASTY = "a\x1b]52;c;aGk=\x07b\x1b[2Jc\x9b31md\u202ee\u2066f\x7fg\u200bh"
EXECUTED = "\x1b\x07\x9b\u202e\u2066\x7f\u200b\x90\x9d"


def test_control_characters_are_escaped():
    with pytest.raises(PolicyError) as wrong:
        load(NASTY)
    assert not {*str(wrong.value)} & {*EXECUTED}
    assert clean("naïve 日本 🙂\u00a0x\n\ty") == "naïve 日本 🙂\u00a0x\n\ty"
    assert clean("a\x1b[31m\x9b\u202e\U000e0041\r") == r"a\x1b[31m\u009b\u202e\U000e0041\r"
    assert clean("a\nb", keep="") == r"a\nb"
    text = json.dumps({NASTY + "\U000e0041": "ü\n"}, ensure_ascii=False, indent=2)
    assert json.loads(clean(text, "\n", as_json=True)) == json.loads(text)
    assert not set(clean(text, "\n", as_json=True)) & set(EXECUTED)


def commands(folder: Path):
    """Every command that prints what is in a file."""
    events = folder / "run.events.jsonl"
    event = {"schema": 1, "seq": 1, "run": NASTY, "kind": NASTY, "step": 1, "problem": NASTY}
    text = json.dumps(event, ensure_ascii=False)
    events.write_bytes(EVENT + text.encode() + b"\n" + NASTY.encode() + b"\n")
    policy, wrong = folder / "p.toml", folder / "wrong.toml"
    policy.write_text('schema = 1\nname = "x\u202e"\ndescription = "a\u202eb\u009b"\n')
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


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_no_command_prints_what_a_terminal_executes(tmp_path, number):
    result = reader.run(*list(commands(tmp_path))[number])
    assert result.text
    assert not set(result.text) & set(EXECUTED), result.text
