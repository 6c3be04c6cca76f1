"""One engine, one process: run a scenario and write its outcome as JSON.

    python scenario.py '{"target": "...", "speculative": {...}, ...}' OUTCOME.json

Both output streams are vLLM's, whose processes write to them until after the end.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOKENS = 24
BACKEND = "CPU_MLA"  # by name: a CPU with AMX tiles would get AMX_MLA


def main(asked: dict[str, Any]) -> dict[str, Any]:
    """Start vLLM on the asked model, decode greedily, and say what came out."""
    from vllm import LLM, SamplingParams

    speculative = asked.get("speculative")
    if speculative is not None and speculative["method"] != "ngram":
        speculative["attention_backend"] = BACKEND
    llm = LLM(
        model=asked["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        enforce_eager=True,
        attention_backend=BACKEND,
        compilation_config={"custom_ops": ["none"]},
        speculative_config=speculative,
        disable_log_stats=False,
    )
    drafts = record_drafts() if asked.get("records_drafts") else None
    params = SamplingParams(
        temperature=0.0,
        max_tokens=asked.get("tokens", TOKENS),
        ignore_eos=True,
        detokenize=False,
        logprobs=2,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]

    def generate() -> dict[str, Any]:
        outputs = [request.outputs[0] for request in llm.generate(prompts, params)]
        margins = [
            best.logprob - second.logprob
            for output in outputs
            for best, second in map(top_two, output.logprobs)
        ]
        said: dict[str, Any] = {
            "tokens": [list(output.token_ids) for output in outputs],
            "margin": min(margins),
        }
        if drafts is not None:
            said["drafts"] = drafts.copy()
            drafts.clear()
        return said

    said = generate()
    said |= counters(llm)
    if asked.get("mutants"):
        from mutants import MUTANTS

        said["again"] = generate()
        said["mutants"] = {}
        for name, mutant in MUTANTS.items():
            with mutant():
                said["mutants"][name] = generate()
        said["afterwards"] = generate()
    return said


def top_two(logprobs: dict[int, Any]) -> list[Any]:
    """The two best of a position."""
    return sorted(logprobs.values(), key=lambda entry: -entry.logprob)[:2]


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own count of drafted and accepted tokens."""
    said = {}
    for metric in llm.get_metrics():
        for word in ("draft_tokens", "accepted_tokens"):
            if metric.name == f"vllm:spec_decode_num_{word}":
                said[word] = metric.value
    return said


def record_drafts() -> list[Any]:
    """Keep the draft ids of every step."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    kept: list[Any] = []
    stock = DFlashProposer.propose

    def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = stock(self, *args, **kwargs)
        kept.append(ids.tolist())
        return ids

    DFlashProposer.propose = propose
    return kept


if __name__ == "__main__":
    said = main(json.loads(sys.argv[1]))
    Path(sys.argv[2]).write_text(json.dumps(said), encoding="utf-8")
