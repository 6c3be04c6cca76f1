"""The host's side of one worker process: start, ask with a timeout, bury."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from mla_decode_contract.target import Target

START_TIMEOUT_S = 180.0
"""For an interpreter that imports torch and the backend."""
STARTS_A_PROCESS = frozenset({"backend.import_is_light"})
"""Cases whose time is an interpreter's start, not the backend's work."""
_POLL_S = 0.05
_BURIAL_S = 10.0
"""How long a worker that has hung up may take to end."""
_TAIL_BYTES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a worker ended while the host waited for it."""

    message: str
    signal: str | None
    tail: str
    """The last lines that the process wrote."""


class Child:
    """One worker process.

    Args:
        target: What the worker prepares.
    """

    def __init__(self, target: Target) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        ours, theirs = Pipe()
        self._channel: Connection[Any, Any] = ours
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our module
            [sys.executable, "-m", "mla_decode_contract.worker", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(theirs.fileno(),),
            env=environment,
            start_new_session=True,
        )
        theirs.close()
        # What the host can import, such as a project under test, the worker can too.
        self._send({"target": target.as_dict(), "path": sys.path})

    def hello(self) -> dict[str, Any] | Death:
        """Wait for the worker to be prepared: its evidence word and machine."""
        return self._answer(START_TIMEOUT_S)

    def run(
        self,
        case_id: str,
        budget_units: float,
        timeout_s: float,
        *,
        mutant: str | None = None,
        seed: int | None = None,
    ) -> dict[str, Any] | Death:
        """Run one case and return its result, or how the worker died of it.

        Args:
            case_id: Which.
            budget_units: Most units of error.
            timeout_s: Longest time; not below `START_TIMEOUT_S` where the case starts an
                interpreter of its own.
            mutant: Wraps the backend for this case alone; the target's by default.
            seed: Draws other data; the target's by default.
        """
        self._log.seek(0, os.SEEK_END)
        message = {
            "case": case_id,
            "budget_units": budget_units,
            "mutant": mutant,
            "seed": seed,
        }
        self._send(message)
        if case_id in STARTS_A_PROCESS:
            timeout_s = max(timeout_s, START_TIMEOUT_S)
        return self._answer(timeout_s)

    def close(self) -> None:
        """End the process, and what it started, if it still runs."""
        self._channel.close()
        if self._process.poll() is None:
            try:
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._kill()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._channel.send_bytes(json.dumps(message).encode())
        except OSError:
            return  # the worker is dead: the answer will say how

    def _answer(self, timeout_s: float) -> dict[str, Any] | Death:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if self._channel.poll(_POLL_S):
                    plain: dict[str, Any] = json.loads(self._channel.recv_bytes())
                    return plain
            except (EOFError, OSError):
                return self._death()
            if self._process.poll() is not None and not self._has_answer():
                return self._death()
        self._kill()
        return Death(
            message=f"hung: no answer within {timeout_s:g} s, killed",
            signal="TIMEOUT",
            tail=self._tail(),
        )

    def _has_answer(self) -> bool:
        try:
            return self._channel.poll(0)
        except OSError:
            return False

    def _death(self) -> Death:
        try:
            status = self._process.wait(timeout=_BURIAL_S)
        except subprocess.TimeoutExpired:
            self._kill()
            return Death(
                message="hung up without ending, killed",
                signal="TIMEOUT",
                tail=self._tail(),
            )
        if status < 0:
            name = signal.Signals(-status).name
            return Death(
                message=f"the process was ended by {name}",
                signal=name,
                tail=self._tail(),
            )
        return Death(
            message=f"the process ended itself with status {status}",
            signal=None,
            tail=self._tail(),
        )

    def _kill(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait()

    def _tail(self) -> str:
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _TAIL_BYTES))
        return self._log.read().decode(errors="replace")
