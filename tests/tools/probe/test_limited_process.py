"""Checkpoints are read in a process with limits; what ends it costs one path its verdict."""

from __future__ import annotations

import os

import pytest
from safetensors.numpy import save_file

from healcore.tools.probe import limited_process
from healcore.tools.probe.checkpoint import probe_checkpoint
from healcore.tools.probe.limited_process import Limits
from healcore.tools.probe.result import NothingToProbe, ProbeError
from tests.hostile.pickles import BEGIN, END, called, torch_file


@pytest.fixture
def good(tmp_path):
    """A file of safetensors."""
    import numpy as np

    save_file({"w": np.ones(4)}, tmp_path / "good.safetensors")
    return tmp_path / "good.safetensors"


def test_what_asks_for_too_much_memory_is_an_error(tmp_path, good):
    size = b"\x8a\x05" + (10**11).to_bytes(5, "little")
    bomb = BEGIN + called("builtins.bytearray", size) + END
    with pytest.raises(ProbeError, match="memory"):
        probe_checkpoint(torch_file(tmp_path / "bomb.pt", bomb))
    assert probe_checkpoint(good).verdict.value == "PASS"


def test_what_ends_the_process_is_an_error_and_the_next_path_is_judged(tmp_path, good):
    deep = BEGIN + b"})" + b"\x85" * 400_000 + b"Ns" + END  # the hash of such a tuple needs a stack
    with pytest.raises(ProbeError, match="the reader process ended"):
        probe_checkpoint(torch_file(tmp_path / "deep.pt", deep))
    assert probe_checkpoint(good).verdict.value == "PASS"


def test_a_process_that_has_ended_meanwhile_is_replaced(good):
    probe_checkpoint(good)
    (process,) = limited_process._running
    os.kill(process._pid, 9)
    with pytest.raises(ProbeError, match="Killed"):
        probe_checkpoint(good)
    assert probe_checkpoint(good).verdict.value == "PASS"
    limited_process.close()
    assert not limited_process._running


def test_errors_keep_their_kind(tmp_path):
    with pytest.raises(NothingToProbe, match="no checkpoint"):
        probe_checkpoint(tmp_path)


def test_limits_grow_with_what_is_stored(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    with open(tmp_path / "b", "wb") as file:
        file.truncate(1 << 30)
    small, large = Limits.of(tmp_path / "a"), Limits.of(tmp_path)
    assert large.memory - small.memory == 4 << 30
    assert large.seconds - small.seconds == 256


def test_a_system_without_limits_says_so(good, monkeypatch):
    monkeypatch.setattr(limited_process, "resource", None)
    result = probe_checkpoint(good)
    assert result.verdict.value == "PASS"
    assert limited_process.NO_LIMITS in result.notes
