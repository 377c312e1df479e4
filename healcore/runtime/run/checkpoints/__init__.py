"""Saves the checkpoints of a run, and knows what became of them.

`schedule` says when a save is due. `saver` saves and deletes, and knows which checkpoints are
finite, damaged or known-good.
"""
