"""Partitions as threads, of which one runs at a time: no clock, no luck.

An agent runs until it waits for a phase. Then copies land and somebody continues, both
drawn from the run's own random numbers: the same seed is the same run.
"""

from __future__ import annotations

import threading

from .races import DeadlockError


class Abandoned(Exception):  # noqa: N818 - nothing went wrong in this partition
    """Another partition has failed."""


class Turns:
    """Who runs, and the copies that have yet to land."""

    def __init__(self, agent, random):
        self.running = agent
        self.random = random
        self.failures = []
        self.copies = []
        """Calls that land a copy, in any order."""
        self._batons = {}
        self._ready = {}
        """Whether an agent that waits may go on."""

    def run(self, bodies):
        """Run functions by agent until all of them have returned."""
        home, everyone_done = self.running, threading.Semaphore(0)
        self._batons = {agent: threading.Semaphore(0) for agent in bodies}
        self._ready = dict.fromkeys(bodies, _always)
        threads = [
            threading.Thread(target=self._life, args=(agent, body, everyone_done))
            for agent, body in bodies.items()
        ]
        for thread in threads:
            thread.start()
        self._hand_over(everyone_done)
        everyone_done.acquire()
        for thread in threads:
            thread.join()
        self.running = home
        while self.copies and not self.failures:
            self._land_one()

    def wait(self, is_ready):
        """Let others run until a condition holds and this agent is drawn."""
        me = self.running
        self._ready[me] = is_ready
        chosen = self._choose()
        if chosen is not me:
            self._batons[chosen].release()
            self._batons[me].acquire()
        self.running = me
        if self.failures:
            raise Abandoned
        self._ready[me] = _always

    def _life(self, agent, body, everyone_done):
        self._batons[agent].acquire()
        self.running = agent
        try:
            if not self.failures:
                body()
        except Abandoned:
            pass
        except Exception as error:  # noqa: BLE001 - raised by run(), in the caller
            self.failures.append(error)
        del self._ready[agent]
        self._hand_over(everyone_done)

    def _hand_over(self, everyone_done):
        if self._ready:
            self._batons[self._choose()].release()
        else:
            everyone_done.release()

    def _choose(self):
        """Land some copies and draw who is next."""
        while not self.failures:
            while self.copies and self.random.random() < 0.5:
                self._land_one()
            ready = [agent for agent, check in self._ready.items() if check()]
            if ready:
                return self.random.choice(ready)
            if self.copies:
                self._land_one()
            else:
                waiting = ", ".join(map(str, self._ready))
                self.failures.append(DeadlockError(f"all of {waiting} wait"))
        return next(iter(self._ready))

    def _land_one(self):
        land = self.copies.pop(self.random.randrange(len(self.copies)))
        try:
            land()
        except RuntimeError as error:
            self.failures.append(error)


def _always():
    return True
