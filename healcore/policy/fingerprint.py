"""A short name for what a policy does."""

from __future__ import annotations

from healcore.policy.document import Policy


def fingerprint(policy: Policy) -> str:
    """Sixteen hex digits, equal where the core is given equal numbers (by one release of healcore).

    Name, description and references do not enter, and numbers enter as the float32 that the core
    sees: 0.97 and 0.9700000001 are one policy. The same as `Engine.fingerprint`.
    """
    found = policy.engine().fingerprint
    assert found is not None, "the numbers of a policy file are Python's"
    return found
