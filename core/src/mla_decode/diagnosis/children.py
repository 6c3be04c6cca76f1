"""Python in a child process: it may die or hang, and the doctor goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

MARK = "mla-decode-doctor:"
"""Begins a line of a child's answer; libraries print what they like beside it."""
PATIENCE_S = 60.0
GRACE_S = 5.0
"""How long an interrupted child may take to give back locks of a build."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAnswer:
    """What a child said before it ended."""

    said: tuple[dict[str, Any], ...]
    """Its marked lines, in order."""
    trouble: str
    """How it ended, empty where it ended well."""


def ask_child(code: str, *arguments: str, timeout_s: float = PATIENCE_S) -> ChildAnswer:
    """Run code as ``python -c`` would here, with the working directory on its path.

    A child that is late is interrupted before it is killed: a library that compiles on
    import then gives its lock back.
    """
    with subprocess.Popen(  # noqa: S603 - our own code, by our own interpreter
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        late = ""
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = f"no answer within {timeout_s:g} s"
            out, err = _end(child)
    said = tuple(
        json.loads(line[len(MARK) :])
        for line in out.splitlines()
        if line.startswith(MARK)
    )
    return ChildAnswer(said=said, trouble=late or _trouble(child.returncode, err))


def say(**fields: object) -> None:
    """Answer, from within a child; flushed, so that a later death takes nothing back."""
    sys.stdout.write(f"\n{MARK}{json.dumps(fields)}\n")
    sys.stdout.flush()


def _end(child: subprocess.Popen[str]) -> tuple[str, str]:
    child.send_signal(signal.SIGINT)
    try:
        return child.communicate(timeout=GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.communicate()


def _trouble(returncode: int, err: str) -> str:
    if returncode == 0:
        return ""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    lines = err.strip().splitlines()
    return lines[-1] if lines else f"exit code {returncode}"
