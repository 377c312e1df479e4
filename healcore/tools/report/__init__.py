"""Reports: the story of a run, or of a replay, as a page and as a picture."""
