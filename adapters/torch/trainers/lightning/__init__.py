"""Heals Lightning's `trainer.fit` with a callback.

callback           the entry point `LightningHealingCallback`
feed               passes the Healer's batches to the loop, and keeps the loop's counters
step_loss          the loss of a batch by `training_step`, to compare weights
trainer_internals  every private name of Lightning that healcore uses
"""
