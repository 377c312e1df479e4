"""For all tests: none may depend on how fast the machine is, or on how the tests were started."""

from __future__ import annotations

import signal

from hypothesis import settings

settings.register_profile("any speed", deadline=None)
settings.load_profile("any speed")

# A shell's background jobs ignore Ctrl-C, and so would every process that a test starts: those that
# are sent one would never end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
