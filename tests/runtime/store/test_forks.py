"""A child forked while a save is under way does not wait for its parent's threads."""

from __future__ import annotations

import os

import pytest

from tests.runtime.store.programs import finish, start


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_child_does_not_wait_for_its_parents_threads(tmp_path):
    finish(start("tests.runtime.store.forks_program", tmp_path))
