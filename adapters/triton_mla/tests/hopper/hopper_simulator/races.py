"""Who knows what is over: the happens-before relation, and accesses judged by it.

An access of shared memory is safe where everything that it must come after is *known*
to whoever makes it: known through barriers, not merely past on this run's schedule.
Knowledge is a vector clock: the newest moment of every source of moments that an agent
has heard of. Sources are agents (partitions of the program) and barriers (whose moments
are their completed phases).

A program whose every access, arrival and wait is judged safe on one schedule does the
same on every other one: each wait acquires the same phase, so knowledge is the same. So
a fault is found on every schedule or on none, and no schedule must be lucky.

An agent is several warps. What one of them has done the others have not, until the
partition's own barrier: `Agent.all_warps` is the last moment that is past for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class SimulationError(RuntimeError):
    """The program would not run, or not the same way each time, on a device."""


class RaceError(SimulationError):
    """Two accesses of shared memory in no order, or a barrier used out of order."""


class DeadlockError(SimulationError):
    """Every partition waits for a phase that nobody will complete."""


def merge(clock, other):
    """Learn in place what another clock knows."""
    for source, moment in other.items():
        if clock.get(source, 0) < moment:
            clock[source] = moment


@dataclass(eq=False)
class Agent:
    """A partition, what it has done and what it knows."""

    name: str
    num_warps: int = 1
    clock: dict = field(default_factory=dict)
    now: int = 1
    gathered: int = 1
    unfenced: list = field(default_factory=list)
    """Its stores that matrix products and copies cannot see yet."""

    def step(self):
        """The moment of something that it does now."""
        self.now += 1
        return self, self.now

    def gather(self):
        """All its warps meet."""
        self.gathered = self.now

    @property
    def all_warps(self):
        """The last moment that is past for every warp."""
        return self.gathered if self.num_warps > 1 else self.now

    def fence(self):
        """Show its stores to matrix products and copies."""
        moment = self.step()
        for access in self.unfenced:
            access.fenced = moment
        self.unfenced.clear()

    def published(self):
        """What an arrival of one of its threads tells others."""
        return {**self.clock, self: self.all_warps}

    def knows(self, moment, *, whole=True):
        """Whether a moment is past; `whole`: for all of its own warps."""
        if moment is None:
            return False
        source, when = moment
        if source is self:
            return when <= (self.all_warps if whole else self.now)
        return self.clock.get(source, 0) >= when

    def __str__(self):
        return self.name


@dataclass(eq=False)
class Access:
    """A read or a write of elements [start, stop), by threads or by an engine."""

    start: int
    stop: int
    what: str
    agent: Agent
    is_plain: bool
    """Made by the agent's threads; else by the matrix unit or the copy engine."""
    over: tuple | None = None
    """The moment that it is over; None while it is in flight."""
    fenced: tuple | None = None
    """Of a plain write: the moment that the engines see it."""

    def overlaps(self, other):
        return self.start < other.stop and other.start < self.stop

    def covers(self, other):
        return self.start <= other.start and other.stop <= self.stop


class History:
    """The accesses of one allocation that something may still conflict with."""

    def __init__(self, name):
        self.name = name
        self.writes = []
        self.reads = []

    def read(self, access):
        """Judge a read, and remember it."""
        for write in self.writes:
            if write.overlaps(access):
                self._require(access, write)
        self.reads = [
            r
            for r in self.reads
            if r.over is None or r.agent is not access.agent or not access.covers(r)
        ]
        self.reads.append(access)

    def write(self, access):
        """Judge a write, and remember it."""
        for earlier in (*self.writes, *self.reads):
            if earlier.overlaps(access):
                self._require(access, earlier)
        self.writes = [w for w in self.writes if not access.covers(w)]
        self.reads = [r for r in self.reads if not access.covers(r)]
        self.writes.append(access)

    def _require(self, access, earlier):
        moment = earlier.over
        if not access.is_plain and earlier.what == "store":
            moment = earlier.fenced
            if moment is None:
                self._refuse(access, earlier, "is not fenced")
        # Between plain accesses of one partition the compiler puts its own barriers.
        whole = not (access.is_plain and earlier.is_plain)
        if not access.agent.knows(moment, whole=whole):
            in_flight = earlier.over is None
            self._refuse(
                access, earlier, "is in flight" if in_flight else "is not known over"
            )

    def _refuse(self, access, earlier, why):
        raise RaceError(
            f"{access.agent}: a {access.what} of {self.name}[{access.start}:"
            f"{access.stop}], where a {earlier.what} by {earlier.agent} {why}"
        )
