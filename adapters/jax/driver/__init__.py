"""The live state of a JAX run, its engines, and the records of its steps.

driver            `JaxDriver`, which the Healer calls
live_state        the live state as a tree of arrays, and as items of a checkpoint
leaf_forms        a leaf in the live state, and in a checkpoint
weights           the weights in the state: copies, losses with earlier ones
engines           the engines in the state
engine_tensors    the tensors that an engine judges, and their names
held_numbers      numbers of the optimizers that are kept in a range
step_reader       the records of the steps, read after each dispatch
blocks            the compiled blocks of `Healer.scan`
"""
