"""What a run tells: console lines and events, the postmortem, trackers."""
