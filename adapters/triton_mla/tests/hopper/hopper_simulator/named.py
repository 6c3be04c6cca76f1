"""Named barriers: numbers at which warps of several partitions meet."""

from __future__ import annotations

import re

from .races import RaceError, SimulationError, merge

NUMBERS = 16
THREADS_OF_A_WARP = 32


def run_meeting(world, asm, number, threads):
    """The inline assembly of an arrival at a named barrier, or of a wait at one."""
    operation = re.match(r"bar\.(arrive|sync) \$1, \$2;", asm)
    if operation is None:
        raise NotImplementedError(asm)
    if not 0 <= number < NUMBERS:
        raise SimulationError(f"named barrier {number} of {NUMBERS}")
    meeting = world.meetings.setdefault(number, Meeting(f"named barrier {number}"))
    agent = world.me
    phase = meeting.arrive(agent, threads)
    if operation.group(1) == "sync":
        agent.gather()
        world.turns.wait(lambda: meeting.over > phase)
        merge(agent.clock, meeting.told[phase])


class Meeting:
    """One named barrier. Its moments are its phases that are over, as of `Barrier`.

    Warps arrive each by itself, so what an arrival tells is all that its partition has
    done. Who arrives must know that the phase before is over, or a warp of theirs might
    come to that one: the hardware counts threads and asks for no names.
    """

    def __init__(self, name):
        self.name = name
        self.over = 0
        self.told = []
        """What each phase that is over tells who waited for it."""
        self._begin(None)

    def _begin(self, expected):
        self.expected = expected
        self.present = 0
        self.telling = {self: self.over + 1}

    def arrive(self, agent, expected):
        """All warps of an agent arrive; the number of the phase that they are in."""
        if agent.clock.get(self, 0) != self.over:
            raise RaceError(
                f"{agent}: arrivals at {self.name} do not know that its phase "
                f"{self.over - 1} is over"
            )
        if self.expected not in {None, expected}:
            raise SimulationError(
                f"{agent}: {self.name} waits for {self.expected} threads, not {expected}"
            )
        self.expected = expected
        self.present += agent.num_warps * THREADS_OF_A_WARP
        if self.present > expected:
            raise RaceError(f"{agent}: more threads at {self.name} than {expected}")
        agent.step()
        merge(self.telling, {**agent.clock, agent: agent.now})
        phase = self.over
        if self.present == expected:
            self.told.append(self.telling)
            self.over += 1
            self._begin(None)
        return phase

    def check_end(self):
        """Raise where somebody is left waiting, or has been for nothing."""
        if self.present:
            raise SimulationError(f"the program ends with threads at {self.name}")
