"""Files that commands write: never over an input, and atomically."""

from __future__ import annotations

import os

import pytest

from healcore.tools.output import OutputError, check_outputs, replacing


def test_an_output_may_not_be_an_input(tmp_path):
    log = tmp_path / "runs" / "log.csv"
    log.parent.mkdir()
    log.write_text("step,loss\n")
    link = tmp_path / "link"
    link.symlink_to(log)
    for output in (log, link):
        for given in (log, log.parent):
            with pytest.raises(OutputError, match="is an input"):
                check_outputs([output], [given])
    check_outputs([tmp_path / "runs" / "new.html"], [log.parent, tmp_path / "not there"])


def test_the_old_file_stays_until_all_is_written(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as draft:
            draft.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "old"
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["out.jsonl"]
