"""The host side of a run, for all frameworks: the Healer, its loop, recovery and checkpoints.

What a program uses:

    healer            `Healer`, a whole run under one policy
    script            `start`, a run without a `with` block
    healing_report    `HealingReport`, which `Healer.report` returns
    run_options       the arguments of `Healer`, checked, and the policy's part for the host

What a framework or a trainer is to the runtime:

    driver            `Driver`, the interface between the Healer and a framework, and its choice
    trainer_access    what the integration of a trainer uses of an open run

What a run does:

    run               the work between two steps, from the start of a run to its end
    data              the position of a run in its data
    faults            exceptions, kinds of failures, retries
    store             checkpoints in memory and in files
    reporting         what a run shows its user
    hang_guard        reports a step that never returns
"""
