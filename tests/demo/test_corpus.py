"""The text: the same on every call, split by file, and its two levels of knowledge."""

from __future__ import annotations

import math

import numpy as np
import pytest

from healcore.demo import corpus


def test_the_same_text_every_time():
    one, other = corpus.load(), corpus.load()
    assert one.digest == other.digest
    assert one.files == other.files
    assert np.array_equal(one.train, other.train)
    assert np.array_equal(one.held_out, other.held_out)


def test_levels_are_between_nothing_and_everything():
    text = corpus.load()
    assert 1.0 < text.byte_pair_loss < text.byte_frequency_loss < math.log(256)


def test_every_tenth_file_is_held_out(tmp_path):
    for index in range(20):
        letter = "x" if index % 10 == 9 else "a"
        (tmp_path / f"m{index:02}.py").write_text(letter * 1000)
    (tmp_path / "notes.txt").write_text("not a source")
    text = corpus.load(tmp_path)
    assert text.files == 20
    assert bytes(text.train) == b"a" * 18_000
    assert bytes(text.held_out) == b"x" * 2_000


def test_a_python_without_sources_is_told(tmp_path):
    (tmp_path / "one.py").write_text("pass")
    with pytest.raises(corpus.CorpusError, match=r"holds 1 of them with 4 bytes"):
        corpus.load(tmp_path)
