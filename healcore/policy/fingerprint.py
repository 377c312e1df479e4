"""A short name for what a policy does."""

from __future__ import annotations

import hashlib
import json

from healcore.policy.document import Policy


def fingerprint(policy: Policy) -> str:
    """Sixteen hex digits, equal where the core is given equal numbers (by one release of healcore).

    Name, description and references do not enter, and numbers enter as the float32 that the core
    sees: 0.97 and 0.9700000001 are one policy.
    """
    text = json.dumps(policy.config(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
