from __future__ import annotations

from tests.tools.report.conftest import healed, stopped

__all__ = ["healed", "stopped"]
