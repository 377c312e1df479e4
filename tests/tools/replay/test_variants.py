"""The variants of a policy that `--vary` names."""

from __future__ import annotations

import pytest

from healcore.policy import load, to_dict
from healcore.tools.replay.vary import VaryError, variants

BASE = load("pretraining")


def test_all_combinations_and_the_base_first():
    found = variants(BASE, ["detect.divergence.rise=5,6,7", "max_skips=5,10"])
    assert list(found)[:3] == [
        BASE.name,
        "detect.divergence.rise=5 max_skips=5",
        "detect.divergence.rise=5 max_skips=10",
    ]
    assert len(found) == 1 + 3 * 2
    documents = [to_dict(policy) for policy in list(found.values())[1:]]
    rises = [document["detect"]["divergence"]["rise"] for document in documents]
    assert rises == [rise for rise in (5.0, 6.0, 7.0) for _ in range(2)]
    assert [document["max_skips"] for document in documents] == [5, 10] * 3
    assert found[BASE.name] == BASE


@pytest.mark.parametrize(
    ("option", "key_word"),
    [
        ("max_skips", "KEY=A,B,C"),
        ("max_skips=", "KEY=A,B,C"),
        ("max_skips=a", "KEY=A,B,C"),
        ("max_skips=1,nan", "max_skips"),
        ("max_skips=-1", "max_skips"),
        ("detect.nothing.rise=1", "nothing"),
        ("a b=1", "KEY=A,B,C"),
        ("max_skips=" + ",".join(map(str, range(1, 200))), "at most 100"),
    ],
)
def test_what_cannot_be_varied(option, key_word):
    with pytest.raises(VaryError, match=key_word):
        variants(BASE, [option])
