"""The live state of a JAX run, its engines, and the records of its steps.

driver            `JaxDriver`, which the Healer calls
program_state     the program's state as a tree of arrays, and as items of a checkpoint
edits             edits of the state by the Healer, from which the next step has to start
processes         the processes of a run, and their votes
leaf_forms        a leaf in the live state, and in a checkpoint
weights           the weights in the state: copies, losses with earlier weights
engines           the engines in the state, and the arrays that they train
held_numbers      numbers of the optimizers that are kept in a range
step_reader       the records of the steps, made some dispatches after each step
engine_readings   what the host reads of the engines, copied after each dispatch
summed_gradients  a batch that the program has divided, because memory ran out
blocks            the compiled blocks of `Healer.scan`
"""
