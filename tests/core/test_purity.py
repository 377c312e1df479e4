"""The core has no framework in it, no branch on an array's value, and arrays that never change."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import healcore.core
from healcore.core.engine import Engine
from healcore.core.recorded import NotRecordable, record
from healcore.core.tree import leaves, map_leaves
from tests.core import fuzz, policies

FILES = sorted(Path(healcore.core.__file__).parent.rglob("*.py"))
ALLOWED = {"numpy", "healcore", "__future__", "typing", "collections", "enum", "functools", "types"}
ALLOWED |= {"contextlib", "hashlib", "json", "math", "numbers", "operator", "unicodedata"}


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of all imports, wherever they stand."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found.add("importlib")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_framework_is_imported(path):
    assert imported(ast.parse(path.read_text())) <= ALLOWED


def test_a_branch_on_a_value_is_refused_where_a_step_is_recorded():
    with pytest.raises(NotRecordable, match=r"xp\.where"):
        record(lambda x, *, xp: 1 if x > 0 else x, np.float32(1))


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_a_traced_step_has_no_branch_and_keeps_its_types(clip):
    """Tracing fails on `if array:`; a type that changed would be traced again at the next step."""
    groups = policies.GROUPS if clip == "adagc" else 0
    engine = Engine(policies.full(clip))
    state = map_leaves(jnp.asarray, engine.init(groups=groups))
    signals = fuzz.at(fuzz.signals(np.random.default_rng(0), 1, 1, groups=groups), 0, 0)
    signals = map_leaves(jnp.asarray, signals)
    after, decision = jax.eval_shape(lambda s, x: engine.step(s, x, xp=jnp), state, signals)
    assert after == jax.eval_shape(lambda s: s, state)
    again, same = jax.eval_shape(lambda s, x: engine.step(s, x, xp=jnp), after, signals)
    assert (again, same) == (after, decision)
    kinds = {"grad_scale": "f4", "lr_scale": "f4", "skip": "?", "group_scale": "f4"}
    for name, value in decision._asdict().items():
        assert value is None or value.dtype == np.dtype(kinds.get(name, "i4")), name


def test_a_step_writes_into_nothing_it_was_given():
    engine = Engine(policies.full("zclip"))
    state = engine.init()
    trace = fuzz.signals(np.random.default_rng(2), 30, 1)
    for i in range(30):
        before = map_leaves(lambda leaf: np.array(leaf), state)
        after, _ = engine.step(state, fuzz.at(trace, i, 0), xp=np)
        for a, b in zip(leaves(before), leaves(state), strict=True):
            np.testing.assert_array_equal(a, b)
        state = after
