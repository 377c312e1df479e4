"""Reports runs and replays, as an HTML page or a PNG picture."""
