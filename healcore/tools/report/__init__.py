"""Reports: a run, or a replay of one, as a page and as a picture."""
