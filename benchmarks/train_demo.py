"""Train the demo's two models: the target on Python's documentation, then its drafter.

    python benchmarks/train_demo.py corpus corpus.bin
    python benchmarks/train_demo.py train corpus.bin weights.npz --budget-s 240

The target learns to continue text, with dense attention that equals the absorbed decode.
It is then rounded to int8, as it ships, and the drafter learns to guess what *that* model
writes: prompts from the training text, continued greedily, and a draft block at many
places of each continuation, under the non-causal mask. Held-out topics judge both, and
no paragraph that quotes them is trained on.

The seed and the two step counts (printed, and kept with the weights) fix the run, up to
the order in which a GPU adds. A budget in seconds sets the step counts from the speed of
the first steps.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import math
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch.nn import functional

from mla_decode.demo import text
from mla_decode.demo.dense import continue_text, draft_logits, target_states
from mla_decode.demo.drafter import BlockDrafter
from mla_decode.demo.model import TargetModel
from mla_decode.demo.shape import ModelShape
from mla_decode.demo.weights import load_weights, round_to_int8, save_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

app = typer.Typer(add_completion=False, no_args_is_help=True)

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "test", "tests", "idle_test", "idlelib", "lib2to3", "pydoc_data"}
)
DOCUMENT_END = b"\x00"
TOPIC_REPEATS = 2
CALIBRATION_STEPS = (20, 60)
"""The steps between which the speed is measured."""
WARMUP_STEPS = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is not learnt."""

    seed: int = 20261129
    target_lr: float = 3e-3
    drafter_lr: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    batch: int = 64
    prompt_len: int = 128
    sampled_len: int = 32
    greedy_len: int = 144
    pool: int = 4096
    drafter_batch: int = 128
    anchors: int = 32
    steps_per_pool: int = 64
    later_slot_weight: float = 0.85


# --- the text -----------------------------------------------------------------------


def stdlib_docstrings() -> Iterator[str]:
    """Read every docstring of the running interpreter's standard library, in order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(
                    node,
                    ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
                ):
                    yield ast.get_docstring(node) or ""


@app.command()
def corpus(path: Path) -> None:
    """Write the training text of this interpreter: topics and docstrings."""
    topics = text.read_topics()
    held_out = tuple(text.held_out_topics(topics).values())
    documents = list(text.training_topics(topics).values()) * TOPIC_REPEATS
    documents += [
        kept
        for doc in dict.fromkeys(stdlib_docstrings())
        if (kept := text.without_held_out(doc, held_out)).strip()
    ]
    data = DOCUMENT_END.join(document.encode() for document in documents)
    path.write_bytes(data)
    print(f"{len(documents)} documents, {len(data)} bytes, {digest(data)}")


def digest(data: bytes) -> str:
    """Name a text by its content."""
    return hashlib.sha256(data).hexdigest()[:16]


# --- training -----------------------------------------------------------------------


def start(module: nn.Module, generator: torch.Generator) -> None:
    """Fill a module's matrices with noise that keeps the scale of what they read."""
    with torch.no_grad():
        for name, tensor in module.named_parameters():
            if tensor.ndim > 1:
                fan_in = tensor.shape[-1] if "key_up" not in name else tensor.shape[-2]
                tensor.normal_(0, fan_in**-0.5, generator=generator)
            if name.endswith(("output.weight", "down.weight")):
                tensor.mul_(0.3)
            if name.startswith("embedding"):
                tensor.mul_(0.5)


def optimise(
    module: nn.Module,
    loss_of: Callable[[], Tensor],
    *,
    lr: float,
    weight_decay: float,
    steps: int | None,
    budget_s: float,
    label: str,
) -> int:
    """Minimise a loss under a warm cosine schedule; returns the number of steps."""
    matrices = [p for p in module.parameters() if p.ndim > 1]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    device = matrices[0].device
    optimiser = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=lr,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    first, last = CALIBRATION_STEPS
    began = time.monotonic()
    measured_from = began
    step = 0
    while steps is None or step < steps:
        progress = 0.0 if steps is None else step / steps
        factor = min((step + 1) / WARMUP_STEPS, 1) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        )
        for group in optimiser.param_groups:
            group["lr"] = lr * factor
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        step += 1
        if step == first:
            loss.item()
            measured_from = time.monotonic()
        if step == last and steps is None:
            loss.item()
            now = time.monotonic()
            speed = (last - first) / (now - measured_from)
            steps = max(step + 1, step + int((budget_s - (now - began)) * speed))
        if step % 250 == 0 or step == steps:
            took = time.monotonic() - began
            print(
                f"{label} {step}/{steps} loss {loss.item():.4f} {took:.0f} s",
                flush=True,
            )
    return step


def train_target(
    target: TargetModel,
    data: Tensor,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    steps: int | None,
    budget_s: float,
) -> int:
    """Teach the target to continue the training text."""
    window = torch.arange(target.shape.max_model_len + 1)

    def loss_of() -> Tensor:
        at = torch.randint(
            len(data) - len(window), (recipe.batch,), generator=generator
        )
        rows = data[(at[:, None] + window).to(data.device)]
        states = target_states(target, rows[:, :-1], dropout=recipe.dropout)
        logits = target.logits(states[:, :, -1])
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), rows[:, 1:].flatten()
        )

    return optimise(
        target,
        loss_of,
        lr=recipe.target_lr,
        weight_decay=recipe.weight_decay,
        steps=steps,
        budget_s=budget_s,
        label="target",
    )


def train_drafter(
    drafter: BlockDrafter,
    target: TargetModel,
    data: Tensor,
    recipe: Recipe,
    generator: torch.Generator,
    *,
    steps: int | None,
    budget_s: float,
) -> int:
    """Teach the drafter what the target writes after prompts of the training text."""
    shape, device = target.shape, data.device
    new = recipe.sampled_len + recipe.greedy_len
    first = recipe.prompt_len + recipe.sampled_len - 1
    last = recipe.prompt_len + new - shape.block_len
    inside = torch.arange(1, shape.block_len, device=device)
    slot_weights = recipe.later_slot_weight ** (inside - 1)
    slot_weights = slot_weights / slot_weights.sum()
    sequences = torch.empty(0)
    count = 0

    def refill() -> Tensor:
        at = torch.randint(
            len(data) - recipe.prompt_len, (recipe.pool, 1), generator=generator
        )
        prompts = data[(at + torch.arange(recipe.prompt_len)).to(device)]
        return continue_text(target, prompts, new, sampled=recipe.sampled_len)

    def loss_of() -> Tensor:
        nonlocal sequences, count
        if count % recipe.steps_per_pool == 0:
            sequences = refill()
        count += 1
        picked = torch.randint(
            recipe.pool, (recipe.drafter_batch,), generator=generator
        )
        tokens = sequences[picked.to(device)]
        with torch.no_grad():
            states = target_states(target, tokens)
        anchors = torch.randint(
            first, last, (recipe.drafter_batch, recipe.anchors), generator=generator
        ).to(device)
        logits = draft_logits(drafter, target.embedding.weight, states, tokens, anchors)
        wanted = (anchors[..., None] + inside).flatten(1)
        labels = tokens.gather(1, wanted)
        losses: Tensor = functional.cross_entropy(
            logits.flatten(0, 2).float(), labels.flatten(), reduction="none"
        )
        losses = losses.view(-1, shape.draft_len) * slot_weights
        return losses.sum(-1).mean()

    return optimise(
        drafter,
        loss_of,
        lr=recipe.drafter_lr,
        weight_decay=recipe.weight_decay,
        steps=steps,
        budget_s=budget_s,
        label="drafter",
    )


# --- judging ------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(target: TargetModel, device: torch.device) -> float:
    """Measure nats a byte on the held-out topics."""
    joined = DOCUMENT_END.join(
        topic.encode() for topic in text.held_out_topics(text.read_topics()).values()
    )
    length = target.shape.max_model_len + 1
    data = torch.frombuffer(bytearray(joined), dtype=torch.uint8).long().to(device)
    rows = data[: len(data) // length * length].view(-1, length)
    logits = target.logits(target_states(target, rows[:, :-1])[:, :, -1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).item()


@torch.no_grad()
def judge(
    target: TargetModel, drafter: BlockDrafter, device: torch.device, *, prompts: int
) -> dict[str, Any]:
    """Replay speculation on held-out prompts, under both masks, in float32."""
    prompt_len, new, block_len = 192, 96, target.shape.block_len
    cut = text.held_out_prompts(
        prompts, prompt_bytes=prompt_len, continuation_bytes=new
    )
    rows = torch.tensor([list(prompt.text) for prompt in cut], device=device)
    tokens = continue_text(target, rows, new + block_len)
    states = target_states(target, tokens)
    count = new
    anchors = torch.arange(prompt_len, prompt_len + count, device=device)
    wanted = anchors[:, None] + torch.arange(1, block_len, device=device)
    labels = tokens[:, wanted]
    scores: dict[str, Any] = {
        "held_out_nats_per_byte": round(held_out_loss(target, device), 4)
    }
    for mask in ("non_causal", "causal"):
        logits = draft_logits(
            drafter,
            target.embedding.weight,
            states,
            tokens,
            anchors.expand(len(rows), -1),
            causal=mask == "causal",
        )
        right = logits.argmax(-1) == labels
        accepted = right.long().cumprod(-1).sum(-1).tolist()
        taken = []
        for row in accepted:
            at = 0
            while at < count:
                taken.append(row[at])
                at += row[at] + 1
        scores[f"accepted_per_block_{mask}"] = round(sum(taken) / len(taken), 4)
        scores[f"right_by_slot_{mask}"] = [
            round(share, 3) for share in right.float().mean((0, 1)).tolist()
        ]
    for index in range(0, prompts, max(1, prompts // 6)):
        print(
            repr(
                bytes(tokens[index, prompt_len - 40 :].tolist()).decode(
                    errors="replace"
                )
            )
        )
    return scores


@app.command()
def train(
    corpus_file: Path,
    weights_file: Path,
    budget_s: Annotated[float, typer.Option(help="Seconds of training.")] = 240.0,
    target_steps: Annotated[int | None, typer.Option()] = None,
    drafter_steps: Annotated[int | None, typer.Option()] = None,
    from_weights: Annotated[
        Path | None, typer.Option(help="Take the target from here; train the drafter.")
    ] = None,
    recipe_json: Annotated[
        str, typer.Option("--recipe", help="Recipe fields to change, as JSON.")
    ] = "{}",
) -> None:
    """Train both models and write their int8 weights."""
    recipe = Recipe(**json.loads(recipe_json))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.manual_seed(recipe.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator().manual_seed(recipe.seed)
    raw = corpus_file.read_bytes()
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long().to(device)
    shape = ModelShape()
    target, drafter = TargetModel(shape), BlockDrafter(shape)
    start(target, generator)
    start(drafter, generator)
    about: dict[str, Any] = {"shape": dataclasses.asdict(shape)}
    if from_weights is None:
        target.to(device)
        about["target_steps"] = train_target(
            target,
            data,
            recipe,
            generator,
            steps=target_steps,
            budget_s=0.55 * budget_s,
        )
    else:
        target, _, before = load_weights(from_weights)
        target.to(device)
        about["target_steps"] = before["target_steps"]
        about["target_recipe"] = before["recipe"]
    round_to_int8(target)
    target.requires_grad_(requires_grad=False)
    drafter.to(device)
    print(f"held-out {held_out_loss(target, device):.4f} nats a byte", flush=True)
    about["drafter_steps"] = train_drafter(
        drafter,
        target,
        data,
        recipe,
        generator,
        steps=drafter_steps,
        budget_s=0.45 * budget_s if from_weights is None else budget_s,
    )
    round_to_int8(drafter)
    torch.set_float32_matmul_precision("highest")
    about["recipe"] = dataclasses.asdict(recipe)
    about["corpus"] = {"bytes": len(raw), "sha256": digest(raw)}
    about["torch"] = torch.__version__
    save_weights(weights_file, target, drafter, about)
    about["held_out"] = judge(target, drafter, device, prompts=48)
    save_weights(weights_file, target, drafter, about)
    print(about, f"{weights_file.stat().st_size} bytes", flush=True)


if __name__ == "__main__":
    app()
