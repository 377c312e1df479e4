"""healbench: small real models trained whole, under every arm, in paired seeds.

    python -m benchmarks.healbench [--quick]
    python -m benchmarks.healbench.sensitivity

A *problem* is a program with its data (problem.py), a *task* is a problem with a name (tasks/), an
*arm* is what watches over the training: nothing, a fixed clip, another package, a policy of
healcore (training.py, arms/). running.py runs every task under every arm in processes of its own
and keeps the results in git, comparing.py compares on with off, table.py shows it. sensitivity.py
runs a few tasks with each number of the policy changed (decision_numbers.py).
"""
