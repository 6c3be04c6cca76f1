"""One run of the machine over a backend; as a script, in a process of its own."""

from __future__ import annotations

import argparse
import itertools
import sys
import zlib

import torch
from fuzz_machine import machine_of
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

STEPS = 50
"""Rules of one example: a decoder's life."""
PHASES = (Phase.generate, Phase.shrink)


def run_machine(target, steps, *, chosen_seed=None, phases=PHASES):
    """Run the machine until it has made so many steps, and return its tally.

    Args:
        target: The backend.
        steps: How many at least.
        chosen_seed: Explores from another seed; None repeats a target's own run.
        phases: Of hypothesis; shrinking takes time and makes the story short.
    """
    machine = machine_of(target)
    first = zlib.crc32(target.name.encode()) if chosen_seed is None else chosen_seed
    for number in itertools.count(first):  # examples may be shorter than asked for
        missing = steps - machine.tally.steps
        if missing <= 0:
            return machine.tally
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=-(-missing // STEPS),
                stateful_step_count=STEPS,
                database=None,
                deadline=None,
                phases=phases,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    raise AssertionError


def main():
    """Run one target and print its histogram."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tally = run_machine(
        TARGETS[options.target], options.steps, chosen_seed=options.seed
    )
    sys.stdout.write(f"{options.target}: {tally}\n")
    if tally.steps < options.steps or tally.fraction < 0.4:
        sys.exit("too few steps, or too few of them decode")


if __name__ == "__main__":
    main()
