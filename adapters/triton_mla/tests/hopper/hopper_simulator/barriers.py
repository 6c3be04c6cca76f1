"""Barriers in shared memory: phases of arrivals and bytes, and what they tell."""

from __future__ import annotations

import builtins

from .races import RaceError, SimulationError, merge


class Barrier:
    """One barrier. Its moments are its completed phases: n means that n are over.

    Waits and arrivals are judged as memory accesses are. An arrival must know that the
    phase before its own is over, or it might count towards that one. A wait must be
    known over before the phase after its own is, or it might look too late and wait for
    one more.
    """

    def __init__(self, name):
        self.name = name
        self.count = None
        self.is_fenced = False
        self.completed = 0
        self.told = []
        """What each completed phase tells who waits for it."""
        self.looks = []
        """Agent, moment, and phases needed of every wait."""

    def init(self, count, agent):
        self.count = self.pending = count
        self.num_bytes = 0
        self.telling = {}
        agent.unfenced.append(self)

    @property
    def fenced(self):
        return self.is_fenced

    @fenced.setter
    def fenced(self, _moment):
        self.is_fenced = True

    def arrive(self, agent, count, num_bytes=0):
        if agent.clock.get(self, 0) != self.completed:
            raise RaceError(
                f"{agent}: arrivals at {self.name} do not know that phase "
                f"{self.completed - 1} is over"
            )
        if count > self.pending:
            raise RaceError(f"{agent}: more arrivals at {self.name} than a phase has")
        self.pending -= count
        self.num_bytes += num_bytes
        merge(self.telling, agent.published())
        if self._settle() and all(
            agent.knows(moment, whole=False)
            for moment in self.told[-1].items()
            if moment[0] is not self
        ):
            agent.clock[self] = self.completed

    def landing(self, agent):
        """The moment that a copy which an agent issues now will be over."""
        return self, agent.clock.get(self, 0) + 1

    def landed(self, num_bytes, moment):
        if moment != (self, self.completed + 1):
            raise RaceError(f"bytes land at {self.name} in a phase after their own")
        self.num_bytes -= num_bytes
        if self.num_bytes < 0:
            raise RaceError(
                f"{-self.num_bytes} bytes more than expected at {self.name}"
            )
        self._settle()

    def needs(self, agent, parity):
        """How many phases a wait needs completed: the least that it can pass at."""
        known = agent.clock.get(self, 0)
        needed = known if known % 2 != parity else known + 1
        look = (agent, agent.step()[1], needed)
        if self.completed > needed:
            self._check_look(look, self.told[needed])
        self.looks.append(look)
        return needed

    def acquire(self, agent, needed):
        if needed:
            merge(agent.clock, self.told[needed - 1])

    def check_end(self):
        """Raise where the program ends within a phase."""
        if self.count is not None and self.num_bytes:
            raise SimulationError(f"{self.num_bytes} bytes never landed at {self.name}")

    def _settle(self):
        if self.pending or self.num_bytes:
            return False
        phase = self.completed
        self.completed += 1
        self.telling[self] = self.completed
        self.told.append(self.telling)
        for look in self.looks:
            if look[2] == phase:
                self._check_look(look, self.telling)
        self.looks = [look for look in self.looks if look[2] > phase]
        self.pending, self.telling = self.count, {self: self.completed}
        return True

    def _check_look(self, look, telling):
        agent, moment, _ = look
        if telling.get(agent, 0) < moment:
            raise RaceError(
                f"{agent}: waiting for parity of {self.name} may see a later phase"
            )


class Barriers:
    """Barriers that are indexed like shared memory."""

    def __init__(self, count, name):
        self.barriers = [Barrier(f"{name}[{i}]") for i in builtins.range(count)]

    def index(self, index):
        if not 0 <= index < len(self.barriers):
            raise SimulationError(f"barrier {index} of {len(self.barriers)}")
        return self.barriers[index]
