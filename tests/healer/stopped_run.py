"""A program whose run is stopped by the policy: `python -m tests.healer.stopped_run`."""

from __future__ import annotations

from tests.healer.training_loops import Faults, loop_of, rules, train


def main() -> None:
    try:
        train(loop_of("torch", Faults(always=range(8, 40))), rules(recoveries=1), range(40))
    except Exception:
        print("swallowed")
    print("went on")


if __name__ == "__main__":
    main()
