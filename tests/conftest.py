"""For all tests: none may depend on how fast the machine is."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")
