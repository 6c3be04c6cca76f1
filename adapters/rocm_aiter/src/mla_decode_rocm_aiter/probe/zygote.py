"""A process that has imported torch and touched no GPU: it forks a child a shape.

Reads a request a line from its input, as JSON, and writes an outcome a line. Forking
saves each child the seconds of an import; a GPU is touched only after the fork.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time
from typing import Any, NoReturn

import torch

from mla_decode_rocm_aiter.probe.child import try_shape
from mla_decode_rocm_aiter.probe.shapes import ProbeShape


def serve() -> None:
    """Answer until the input ends."""
    for line in sys.stdin:
        sys.stdout.write(json.dumps(fork_and_wait(json.loads(line))) + "\n")
        sys.stdout.flush()


def fork_and_wait(asked: dict[str, Any]) -> dict[str, str]:
    """Run one shape in a child; its death or its silence is an outcome."""
    answer_end, answer_in = os.pipe()
    errors_end, errors_in = os.pipe()
    child = os.fork()
    if child == 0:
        _run_child(asked, answer_in, errors_in)
    os.close(answer_in)
    os.close(errors_in)
    texts = _read_until(asked["timeout_s"], answer_end, errors_end)
    if texts is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        detail = f"no answer after {asked['timeout_s']:g} s"
        return {"outcome": "hangs", "detail": detail}
    _, status = os.waitpid(child, 0)
    answer, errors = texts
    if status == 0 and answer:
        found: dict[str, str] = json.loads(answer)
        return found
    last = (errors.strip().splitlines() or [""])[-1]
    return {"outcome": "dies", "detail": f"{_ending(status)}: {last}"}


def _run_child(asked: dict[str, Any], answer: int, errors: int) -> NoReturn:
    """The child: whatever it prints goes to the errors, its outcome to the answer."""
    os.dup2(errors, 1)
    os.dup2(errors, 2)
    torch.set_num_threads(1)  # the GPU computes, or shapes this small do
    outcome, detail = try_shape(ProbeShape(**asked["shape"]), asked["simulated"])
    os.write(answer, json.dumps({"outcome": outcome, "detail": detail}).encode())
    os._exit(0)


def _read_until(timeout_s: float, *ends: int) -> list[str] | None:
    """Read pipes to their ends; None if that takes too long."""
    texts = dict.fromkeys(ends, b"")
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                for end in ends:
                    os.close(end)
                return None
            for key, _ in ready:
                piece = os.read(key.fd, 65536)
                texts[key.fd] += piece
                if not piece:
                    selector.unregister(key.fd)
    for end in ends:
        os.close(end)
    return [text.decode(errors="replace") for text in texts.values()]


def _ending(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit {os.waitstatus_to_exitcode(status)}"


if __name__ == "__main__":
    serve()
