"""What a run of the demo found, as data and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mla_decode.demo.attention import CallKind
    from mla_decode.demo.measure import Acceptance, Divergence


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One prompt and its continuations."""

    topic: str
    prompt: str
    plain: str
    speculative: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Share of 4-grams that their own text already held, so that loops show."""

    words: float
    """Of words, in what the model wrote."""
    words_held_out: float
    """Of words, in what the topics say in the same places."""
    tokens: float
    """Of tokens (bytes), in what the model wrote."""
    tokens_held_out: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """Everything that a run of the demo found."""

    num_prompts: int
    num_tokens: int
    """New tokens over all prompts, of each way of generating."""
    draft_len: int
    batch: int
    device: str
    dtype: str
    greedy_identical: bool
    """Whether plain and both speculative runs wrote the same tokens, all of them."""
    divergences: tuple[Divergence, ...]
    smallest_margin: float
    """The closest call of the plain run: best logit over second best."""
    non_causal: Acceptance
    causal: Acceptance
    """The same drafter, its blocks masked causally."""
    non_causal_without_repeats: Acceptance
    """Only prompts whose continuation repeats no 4-gram of words."""
    repeats: Repeats
    plain_s_per_token: float
    """Wall seconds over tokens, all prompts of a batch together; prompts excluded."""
    speculative_s_per_token: float
    call_kinds: tuple[tuple[str, CallKind], ...]
    """Attention calls by run (``plain``, ``speculative``, ``causal_mask``)."""
    samples: tuple[Sample, ...]

    @property
    def backend(self) -> str:
        """Who attended, joined by ``+`` where groups were served differently."""
        names = dict.fromkeys(kind.backend for _, kind in self.call_kinds)
        return "+".join(names)

    def calls(self, run: str) -> dict[str, int]:
        """Calls of `MLADecoder.run` by mask, in one run."""
        counts = {"causal": 0, "non_causal": 0}
        for name, kind in self.call_kinds:
            if name == run:
                counts[kind.mask] += kind.count
        return counts

    def as_dict(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        return {
            "greedy_identical": self.greedy_identical,
            "accepted_per_block": self.non_causal.per_block,
            "accepted_per_block_causal_mask": self.causal.per_block,
            "tokens_per_target_pass": self.non_causal.tokens_per_target_pass,
            "backend": self.backend,
            "calls": self.calls("speculative"),
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
            "draft_len": self.draft_len,
            "batch": self.batch,
            "device": self.device,
            "dtype": self.dtype,
            "blocks": self.non_causal.num_blocks,
            "accepted_by_position": list(self.non_causal.by_position),
            "accepted_by_position_causal_mask": list(self.causal.by_position),
            "accepted_per_block_without_repeats": (
                self.non_causal_without_repeats.per_block
            ),
            "blocks_without_repeats": self.non_causal_without_repeats.num_blocks,
            "repeated_4grams": asdict(self.repeats),
            "s_per_token": {
                "plain": self.plain_s_per_token,
                "speculative": self.speculative_s_per_token,
            },
            "smallest_margin": self.smallest_margin,
            "divergences": [asdict(item) for item in self.divergences],
            "attention_calls": [
                {"run": run, **asdict(kind)} for run, kind in self.call_kinds
            ],
            "samples": [asdict(sample) for sample in self.samples],
        }
