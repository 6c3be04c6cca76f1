"""The demo from end to end: held-out prompts in, a report out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from mla_decode.demo.attention import Serving
from mla_decode.demo.generate import PROMPT_BLOCK, Generation, Generator
from mla_decode.demo.measure import acceptance, divergences, repeated_share
from mla_decode.demo.report import DemoReport, Repeats, Sample
from mla_decode.demo.text import held_out_prompts
from mla_decode.demo.weights import load_weights
from mla_decode.device import as_device_info
from mla_decode.errors import ArgumentError
from mla_decode.mask import Mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mla_decode.demo.attention import CallKind
    from mla_decode.demo.text import Prompt
    from mla_decode.device import DeviceInfo
    from mla_decode.selection import Lowering

PROMPT_LEN = 6 * PROMPT_BLOCK
"""Tokens of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """How large a run is, and who serves it."""

    prompts: int = 32
    tokens: int = 96
    """New tokens of each prompt."""
    draft_len: int = 6
    batch: int = 2
    """Prompts that generate at the same time."""
    backend: str = "auto"
    lowering: Lowering = "refuse"
    device: DeviceInfo | str | None = None
    """None: this machine's first accelerator, or its CPU."""


def run_demo(
    options: DemoOptions | None = None,
    *,
    progress: Callable[[float], None] = lambda _: None,
) -> DemoReport:
    """Generate from held-out prompts with and without speculation, and compare.

    Args:
        options: Size and serving; the defaults where None.
        progress: Told the finished share of the work, from 0 to 1.

    Raises:
        ArgumentError: A size that the model does not have.
        BackendRefused: Nobody serves the attention of one of the models.
        TextError: This Python carries too little held-out text.
        WeightsError: The shipped weights are missing.
    """
    options = options or DemoOptions()
    target, drafter, _ = load_weights()
    shape = target.shape
    longest = shape.max_model_len - PROMPT_LEN - shape.block_len
    for name, most in (
        ("prompts", 4096),
        ("tokens", longest),
        ("draft_len", shape.draft_len),
        ("batch", 4096),
    ):
        _require_within(name, getattr(options, name), most)
    prompts = held_out_prompts(
        options.prompts, prompt_bytes=PROMPT_LEN, continuation_bytes=options.tokens
    )
    generator = Generator(
        target,
        drafter,
        Serving(
            device=as_device_info(options.device),
            backend=options.backend,
            lowering=options.lowering,
        ),
        draft_len=options.draft_len,
        num_reqs=min(options.batch, options.prompts),
    )
    plain, speculative, causal = _generate(generator, prompts, options, progress)
    return _report(options, prompts, generator.serving, (plain, speculative, causal))


def _require_within(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ArgumentError(
            f"The demo cannot run with this number of {name}.",
            got=f"{name} = {value}",
            allowed=f"1..{most}",
            fix=f"choose {name} within that range",
        )


def _generate(
    generator: Generator,
    prompts: Sequence[Prompt],
    options: DemoOptions,
    progress: Callable[[float], None],
) -> tuple[Generation, Generation, Generation]:
    """Run all batches three ways: plain, speculative, and causally masked drafts."""
    device = generator.serving.device.torch_device
    runs: tuple[list[Generation], ...] = ([], [], [])
    for first in range(0, len(prompts), options.batch):
        batch = prompts[first : first + options.batch]
        tokens = torch.tensor([list(prompt.text) for prompt in batch], device=device)
        runs[0].append(generator.plain(tokens, options.tokens))
        progress((first + len(batch) / 2) / len(prompts))
        for run, mask in zip(runs[1:], (Mask.NON_CAUSAL, Mask.CAUSAL), strict=True):
            run.append(generator.speculative(tokens, options.tokens, mask))
        progress((first + len(batch)) / len(prompts))
    return join(runs[0]), join(runs[1]), join(runs[2])


def join(parts: Sequence[Generation]) -> Generation:
    """Put the batches of one way of generating together."""
    return Generation(
        tokens=tuple(row for part in parts for row in part.tokens),
        margins=tuple(row for part in parts for row in part.margins),
        accepted=tuple(row for part in parts for row in part.accepted),
        decode_s=sum(part.decode_s for part in parts),
        calls=add_calls(kind for part in parts for kind in part.calls),
    )


def add_calls(kinds: Iterable[CallKind]) -> tuple[CallKind, ...]:
    """Add up the counts of equal kinds."""
    totals: Counter[CallKind] = Counter()
    for kind in kinds:
        totals[replace(kind, count=0)] += kind.count
    return tuple(replace(kind, count=count) for kind, count in totals.items())


def _report(
    options: DemoOptions,
    prompts: Sequence[Prompt],
    serving: Serving,
    runs: tuple[Generation, Generation, Generation],
) -> DemoReport:
    """Turn three ways of generating the same text into figures."""
    plain, speculative, causal = runs
    parted = tuple(
        item
        for run in (speculative, causal)
        for item in divergences(plain.tokens, run.tokens, plain.margins)
    )
    num_tokens = sum(map(len, plain.tokens))
    words = [decode(row).split() for row in speculative.tokens]
    said = [prompt.continuation for prompt in prompts]
    return DemoReport(
        num_prompts=len(prompts),
        num_tokens=num_tokens,
        draft_len=options.draft_len,
        batch=options.batch,
        device=serving.device.name or serving.device.arch,
        dtype=serving.dtype,
        greedy_identical=not parted,
        divergences=parted,
        smallest_margin=min(min(row) for row in plain.margins),
        non_causal=acceptance(speculative.accepted, options.draft_len),
        causal=acceptance(causal.accepted, options.draft_len),
        non_causal_without_repeats=acceptance(
            (
                blocks
                for blocks, text in zip(speculative.accepted, words, strict=True)
                if not repeated_share([text])
            ),
            options.draft_len,
        ),
        repeats=Repeats(
            words=repeated_share(words),
            words_held_out=repeated_share([decode(text).split() for text in said]),
            tokens=repeated_share(speculative.tokens),
            tokens_held_out=repeated_share([tuple(text) for text in said]),
        ),
        plain_s_per_token=plain.decode_s / num_tokens,
        speculative_s_per_token=speculative.decode_s / num_tokens,
        call_kinds=tuple(
            (name, kind)
            for name, run in zip(
                ("plain", "speculative", "causal_mask"), runs, strict=True
            )
            for kind in run.calls
        ),
        samples=tuple(
            Sample(
                topic=prompt.topic,
                prompt=decode(prompt.text),
                plain=decode(without),
                speculative=decode(with_drafts),
            )
            for prompt, without, with_drafts in zip(
                prompts, plain.tokens, speculative.tokens, strict=True
            )
        ),
    )


def decode(tokens: Sequence[int] | bytes) -> str:
    """Read tokens, which are bytes, as text; a cut character shows as a mark."""
    return bytes(tokens).decode(errors="replace")
