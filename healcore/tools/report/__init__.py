"""Reports runs and replays, as an HTML page or an SVG figure."""
