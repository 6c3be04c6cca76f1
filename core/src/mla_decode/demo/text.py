"""The text: Python's own documentation topics, split by name into two parts.

Every interpreter carries the topics of its `help()` (`pydoc_data.topics`), so the demo
needs no download. A topic is *held out* by a hash of its name, which does not move when
the wording of a topic does: the split is the same on every Python.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mla_decode.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

HELD_OUT_ONE_IN = 6
"""About one topic in this many is held out."""

SHARED_RUN_WORDS = 8
"""A training paragraph with this many words in a row of held-out text is dropped."""

_PARAGRAPH_BREAK = re.compile(r"\n[ \t]*\n")


class TextError(ContractError, RuntimeError):
    """The interpreter does not carry the text that was asked for."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A piece of a held-out topic that the model is asked to continue."""

    topic: str
    """Name of the topic, as `help()` knows it."""
    text: bytes
    """What the model reads, UTF-8."""
    continuation: bytes
    """What the topic says next: never shown to the model, only measured beside it."""


def is_held_out(name: str) -> bool:
    """Tell whether the topic of this name is kept for judging, never for training."""
    return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


def read_topics() -> dict[str, str]:
    """Read the documentation topics of the running interpreter, by name.

    Raises:
        TextError: The interpreter was installed without `pydoc_data`.
    """
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError as error:
        raise TextError(
            "The demo reads Python's documentation topics and found none.",
            got="an interpreter without pydoc_data.topics",
            allowed="a Python with its full standard library",
            fix="install the rest of this Python's standard library",
        ) from error
    topics: dict[str, str] = module.topics
    return topics


def held_out_topics(topics: Mapping[str, str]) -> dict[str, str]:
    """Keep the topics that judge, in order of name."""
    return {name: topics[name] for name in sorted(topics) if is_held_out(name)}


def training_topics(topics: Mapping[str, str]) -> dict[str, str]:
    """Keep the topics that train, in order of name, and drop what they quote.

    Topics quote each other (`compound` holds all of `try`): see `without_held_out`.
    """
    held_out = held_out_topics(topics)
    return {
        name: without_held_out(topics[name], held_out.values())
        for name in sorted(topics)
        if not is_held_out(name)
    }


def without_held_out(text: str, held_out: Iterable[str]) -> str:
    """Drop each paragraph that shares `SHARED_RUN_WORDS` words with a held-out text."""
    forbidden = {run for other in held_out for run in word_runs(other)}
    return "\n\n".join(
        paragraph
        for paragraph in _PARAGRAPH_BREAK.split(text)
        if forbidden.isdisjoint(word_runs(paragraph))
    )


def word_runs(text: str, length: int = SHARED_RUN_WORDS) -> set[tuple[str, ...]]:
    """Collect every run of `length` words in a row, white space set aside."""
    words = text.split()
    return {tuple(words[at : at + length]) for at in range(len(words) - length + 1)}


def held_out_prompts(
    count: int, *, prompt_bytes: int, continuation_bytes: int
) -> list[Prompt]:
    """Cut prompts from the held-out topics, each at the start of a paragraph.

    Topics take turns, so that a long one does not crowd out the others, and the prompts
    of one topic do not overlap.

    Args:
        count: How many prompts.
        prompt_bytes: Length of each prompt, in bytes: equal for all, so that they
            batch as uniform blocks.
        continuation_bytes: Length of the topic's own text after each prompt.

    Raises:
        TextError: The held-out topics are too short for that many.
    """
    cuts = {
        name: _cut(text.encode(), prompt_bytes, continuation_bytes)
        for name, text in held_out_topics(read_topics()).items()
    }
    prompts: list[Prompt] = []
    turn = 0
    while len(prompts) < count:
        taken = [
            Prompt(
                topic=name,
                text=pieces[turn][:prompt_bytes],
                continuation=pieces[turn][prompt_bytes:],
            )
            for name, pieces in cuts.items()
            if turn < len(pieces)
        ]
        if not taken:
            raise TextError(
                "The held-out topics are too short for that many prompts.",
                got=f"{count} prompts of {prompt_bytes} + {continuation_bytes} bytes",
                allowed=f"{len(prompts)} of that length, with this Python's topics",
                fix="ask for fewer prompts, or for fewer tokens of each",
            )
        prompts.extend(taken)
        turn += 1
    return prompts[:count]


def _cut(text: bytes, prompt_bytes: int, continuation_bytes: int) -> list[bytes]:
    """Cut pieces of one topic that start at a paragraph and do not overlap."""
    length = prompt_bytes + continuation_bytes
    starts = [0, *(match.end() for match in re.finditer(rb"\n[ \t]*\n", text))]
    pieces: list[bytes] = []
    free_from = 0
    for start in starts:
        if start >= free_from and start + length <= len(text):
            pieces.append(text[start : start + length])
            free_from = start + prompt_bytes
    return pieces
