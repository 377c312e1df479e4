"""Reports of a run, or of a replay of one, as a page and as a picture."""
