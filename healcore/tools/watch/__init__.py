"""Following a live run in a terminal."""
