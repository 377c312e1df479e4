"""What happened in a run, in words, and why the run ended: facts, diagnosis and their file."""
