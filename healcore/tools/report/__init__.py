"""Reports of runs and of replays, as a page and as a picture."""
