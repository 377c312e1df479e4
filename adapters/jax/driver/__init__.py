"""The live state of a JAX run, its engines, and the records of its steps.

driver            `JaxDriver`, which the Healer calls
weights           the part of the driver that copies weights, and computes losses with them
program_state     the program's state as a tree of arrays, and as items of a checkpoint
engines           the engines in the state, the arrays that they train, and their numbers
step_reader       the records of the steps, made some dispatches after each step
summed_gradients  a batch that the program has divided, because memory ran out
blocks            the compiled blocks of `Healer.scan`
"""
