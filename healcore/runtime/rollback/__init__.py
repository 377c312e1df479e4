"""Going back: which checkpoints are known-good, which is taken, and what a crash cannot undo."""
