"""A trace of requests, replayed as an engine's continuous batching would serve it."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from mla_decode.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MOMENT = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Header names of a trace; the defaults are the public traces'."""

    timestamp: str = "TIMESTAMP"
    context: str = "ContextTokens"
    generated: str = "GeneratedTokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line of a trace."""

    arrival_s: float
    context: int
    """Tokens of the prompt."""
    generated: int
    """Tokens of the answer."""


def read_trace(path: Path, columns: Columns) -> tuple[Request, ...]:
    """Read a trace, in order of arrival.

    Raises:
        ArgumentError: No such file, a missing column, or a line that is no request.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = tuple(reader.fieldnames or ())
            wanted = (columns.timestamp, columns.context, columns.generated)
            if not set(wanted) <= set(header):
                raise _bad(
                    "The trace lacks a column.",
                    got=", ".join(header) or "an empty file",
                    allowed=", ".join(wanted),
                )
            requests = [_request(line, columns, reader.line_num) for line in reader]
    except OSError as error:
        raise _bad(
            "The trace cannot be read.",
            got=f"{path}: {error.strerror}",
            allowed="a CSV file",
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise _bad(
            "The trace is no CSV.", got=f"{path}: {error}", allowed="UTF-8 lines"
        ) from error
    if not requests:
        raise _bad("The trace has no request.", got="0 lines", allowed="1 or more")
    return tuple(sorted(requests, key=lambda request: request.arrival_s))


def replay(
    requests: tuple[Request, ...],
    *,
    max_batch: int,
    query_len: int,
    accepted: float,
    step_s: float,
) -> Iterator[tuple[int, ...]]:
    """The lengths of every decode step's requests, as they come and go.

    Args:
        requests: In order of arrival.
        max_batch: Most requests that decode at the same time; others wait.
        query_len: Tokens of each request's block.
        accepted: Tokens that a request advances by in a step, 1 to query_len.
        step_s: How long a step lasts on the trace's own clock.

    Yields:
        Keys of each request, its block's included.
    """
    clock, position = requests[0].arrival_s, 0
    active: list[tuple[int, float, int]] = []
    while active or position < len(requests):
        if not active:
            clock = max(clock, requests[position].arrival_s)
        while (
            len(active) < max_batch
            and position < len(requests)
            and requests[position].arrival_s <= clock
        ):
            active.append((requests[position].context, 0.0, position))
            position += 1
        yield tuple(context + int(done) + query_len for context, done, _ in active)
        moved = [(context, done + accepted, which) for context, done, which in active]
        active = [one for one in moved if one[1] < requests[one[2]].generated]
        clock += step_s


def _request(line: dict[str, str], columns: Columns, number: int) -> Request:
    try:
        return Request(
            arrival_s=_seconds(line[columns.timestamp]),
            context=_count(line[columns.context]),
            generated=_count(line[columns.generated]),
        )
    except (ValueError, TypeError) as error:
        raise _bad(
            "A line of the trace is no request.",
            got=f"line {number}: {error}",
            allowed="a time, and two counts of 0 or more",
        ) from error


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise ValueError(f"{count} tokens")
    return count


def _seconds(text: str) -> float:
    """Seconds as a number, or a date with a time of any precision."""
    found = _MOMENT.match(text)
    if found is None:
        seconds = float(text)
        if not math.isfinite(seconds):
            raise ValueError(f"{text} is no time")
        return seconds
    day = datetime.fromisoformat(f"{found[1]} {found[2]}+00:00")
    return day.timestamp() + float(found[3] or 0)


def _bad(message: str, *, got: str, allowed: str) -> ArgumentError:
    return ArgumentError(
        message,
        got=got,
        allowed=allowed,
        fix="correct the file, or name its columns with --trace-columns",
    )
