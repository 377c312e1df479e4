"""healbench: small real models trained whole, under every arm, in paired seeds.

    python -m benchmarks.healbench [--quick]

A *problem* is a program with its data (problem.py), a *task* is a problem with a name (tasks/), an
*arm* is what watches over the training: nothing, a fixed clip, another package, a policy of
healcore (training.py, arms/). running.py runs every task under every arm in processes of its own,
comparing.py compares on with off, table.py shows it.
"""
