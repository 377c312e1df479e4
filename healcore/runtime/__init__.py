"""The host side of a run, for all frameworks: the Healer, its loop, recovery and checkpoints."""
