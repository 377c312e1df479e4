"""Reports of a run: console lines and events, the postmortem, trackers."""
