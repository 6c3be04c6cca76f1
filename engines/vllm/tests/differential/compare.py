"""What vLLM's own AITER builder hands to AITER, beside what our adapter hands.

    python compare.py SEED COUNT

Runs vLLM's real `_build_decode` and `_forward_mqa` on a CPU, with the adapter's
simulator as `aiter`, and prints, a line a case, which arguments differ.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import sys
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from mla_decode import (
    BackendRefused,
    CommonAttentionMetadata,
    DecodeProblem,
    DeviceInfo,
    Mask,
    discover,
)
from mla_decode_rocm_aiter.simulator import Machine, install

ARCH, RELEASE = "gfx950", "0.1.20.post1"
MAX_REQS, MAX_LEN, SCALE = 8, 160, 0.07


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One drawn batch."""

    heads: int
    kv: str
    q: int
    causal: bool
    page: int
    graphs: bool
    lens: tuple[int, ...]
    """Keys of each real request, its block included."""
    pads: int

    @property
    def reqs(self) -> int:
        """Requests, pads included."""
        return len(self.lens) + self.pads

    @property
    def rows(self) -> int:
        """Query rows, those of pads included."""
        return self.reqs * self.q


def draw(rng: random.Random) -> Case:
    """A batch of any kind that both sides are meant for."""
    q = rng.choice((1, 1, 2, 3, 4, 5, 6, 7, 8))
    lens = tuple(rng.randint(q, MAX_LEN) for _ in range(rng.randint(1, 5)))
    return Case(
        heads=rng.choice((4, 8, 12, 16, 16, 32, 40, 64, 128)),
        kv=rng.choice(("bf16", "fp8")),
        q=q,
        causal=rng.random() < 0.5,
        page=rng.choice((1, 16, 64)),
        graphs=rng.random() < 0.5,
        lens=lens,
        pads=rng.choice((0, 0, 1, 2)),
    )


class Recorder:
    """Stands in for AITER's two functions and keeps the arguments by name."""

    def __init__(self, modules: Any) -> None:
        self.calls: dict[str, dict[str, Any]] = {}
        for module, name in (
            (modules["aiter"], "get_mla_metadata_v1"),
            (modules["aiter.mla"], "mla_decode_fwd"),
        ):
            setattr(module, name, self.wrap(name, getattr(module, name)))

    def wrap(self, name: str, function: Any) -> Any:
        """The same signature; a call is bound to it and kept, not made."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def kept(*args: Any, **kwargs: Any) -> tuple[None, None]:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls[name] = dict(bound.arguments)
            return None, None

        return kept

    def take(self) -> dict[str, dict[str, Any]]:
        """The calls since the last take."""
        taken, self.calls = self.calls, {}
        return taken


class Batch:
    """A case as tensors that both sides read."""

    def __init__(self, case: Case, rng: random.Random) -> None:
        pads = [0] * case.pads
        blocks = [case.q] * len(case.lens) + pads
        self.starts = torch.tensor([0, *blocks], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        self.lens = torch.tensor([*case.lens, *pads], dtype=torch.int32)
        width = -(-MAX_LEN // case.page)
        order = list(range(case.reqs * width))
        rng.shuffle(order)
        self.table = torch.tensor(order, dtype=torch.int32).view(case.reqs, width)
        dtype = torch.float8_e4m3fn if case.kv == "fp8" else torch.bfloat16
        self.cache = torch.zeros(case.reqs * width, case.page, 576, dtype=dtype)
        q = torch.randn(case.rows, case.heads, 576, dtype=torch.bfloat16)
        self.q = q.to(dtype) if case.kv == "fp8" else q.split([512, 64], dim=-1)
        self.scale = torch.ones(1)


def theirs(case: Case, batch: Batch) -> None:
    """vLLM's builder and implementation, with what their constructors would set."""
    from vllm.v1.attention.backends.mla import rocm_aiter_mla as stock

    builder = object.__new__(stock.AiterMLAMetadataBuilder)
    dtype = torch.float8_e4m3fn if case.kv == "fp8" else torch.bfloat16
    buffers = [torch.zeros(8, dtype=torch.int32) for _ in range(6)]
    names = (
        "work_meta_data",
        "work_indptr",
        "work_info_set",
        "reduce_indptr",
        "reduce_final_map",
        "reduce_partial_map",
    )
    ints = functools.partial(torch.zeros, dtype=torch.int32)
    vars(builder).update(
        device=torch.device("cpu"),
        num_heads=case.heads,
        _decode_num_heads=case.heads,
        dcp_world_size=1,
        dcp_rank=0,
        _decode_causal=case.causal,
        _varlen_decode_qlen=0,
        _mtp_decode_qlen=case.q,
        _asm_dcp_verify=False,
        _asm_dcp_verify_heads=0,
        _mla_max_split_per_batch=0,
        _kv_cache_dtype_str="fp8" if case.kv == "fp8" else "auto",
        _kv_cache_bytes=batch.cache.nbytes,
        _mla_q_dtype=dtype,
        _mla_kv_dtype=dtype,
        decode_attn_out_dtype=torch.bfloat16,
        kernel_block_size=case.page,
        paged_kv_last_page_len=torch.ones(MAX_REQS, dtype=torch.int32),
        paged_kv_indices=ints(MAX_REQS * (MAX_LEN + 8)),
        paged_kv_indptr=ints(MAX_REQS + 1),
        qo_indptr=ints(MAX_REQS + 1),
        _graph_seq_lens=ints(MAX_REQS) if case.graphs else None,
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: case.graphs)
        ),
        **{f"_mla_{name}": kept for name, kept in zip(names, buffers, strict=True)},
    )
    decode = builder._build_decode(
        block_table_tensor=batch.table,
        seq_lens_device=batch.lens,
        max_seq_len=MAX_LEN,
        query_start_loc_cpu=batch.starts,
        query_start_loc_device=batch.starts,
        num_decode_tokens=case.rows,
        max_query_len=case.q,
        dcp_tot_seq_lens_device=None,
    )
    has_schedule = decode.has_persistent_metadata
    metadata = SimpleNamespace(
        decode=decode,
        causal=case.causal,
        **dict(zip(names, buffers if has_schedule else [None] * 6, strict=True)),
    )
    impl = object.__new__(stock.AiterMLAImpl)
    vars(impl).update(
        num_heads=case.heads,
        dcp_world_size=1,
        scale=SCALE,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        kv_cache_dtype="fp8" if case.kv == "fp8" else "auto",
    )
    layer = SimpleNamespace(_q_scale=batch.scale, _k_scale=batch.scale)
    impl._forward_mqa(batch.q, batch.cache, metadata, layer)


def ours(case: Case, batch: Batch) -> None:
    """The adapter, from the same tensors."""
    backend = discover()["rocm_aiter"].backend
    problem = DecodeProblem(
        num_q_heads=case.heads,
        q_dtype=case.kv,
        kv_dtype=case.kv,
        page_size=case.page,
        query_lens=frozenset({case.q}),
        masks=frozenset({Mask.CAUSAL if case.causal else Mask.NON_CAUSAL}),
        graphs=case.graphs,
        max_num_reqs=MAX_REQS,
        max_model_len=MAX_LEN,
    )
    device = DeviceInfo.assume(ARCH, libraries={"amd-aiter": RELEASE})
    reasons = backend.refusals(problem, device)
    if reasons:
        raise BackendRefused("rocm_aiter refuses.", {"rocm_aiter": reasons})
    builder = backend.builder_cls(problem, device)
    plan = builder.build(
        CommonAttentionMetadata(
            query_start_loc=batch.starts,
            query_start_loc_cpu=batch.starts,
            seq_lens=batch.lens,
            num_reqs=case.reqs,
            num_actual_tokens=case.rows,
            max_query_len=case.q,
            max_seq_len=MAX_LEN,
            block_table_tensor=batch.table,
            causal=case.causal,
        )
    )
    scale = batch.scale if case.kv == "fp8" else None
    backend.forward(
        batch.q, batch.cache, plan, softmax_scale=SCALE, q_scale=scale, kv_scale=scale
    )


def plain(name: str, value: Any, call: dict[str, Any]) -> Any:
    """An argument in a form that two sides can be compared in."""
    if name.startswith(("work_", "reduce_")):
        return "a buffer" if isinstance(value, torch.Tensor) else value
    if not isinstance(value, torch.Tensor):
        return str(value) if isinstance(value, torch.dtype) else value
    if name == "kv_indices":
        return value[: int(call["kv_indptr"][-1])].tolist()
    if name == "o":
        return [list(value.shape), str(value.dtype)]
    if name in {"q", "kv_buffer"}:
        content = value.float().sum(dim=-1).flatten().tolist()
        return [list(value.shape), list(value.stride()), str(value.dtype), content]
    return value.tolist()


def outcome(run: Any, case: Case, batch: Batch, recorder: Recorder) -> dict[str, Any]:
    """The calls of one side, or its refusal."""
    try:
        run(case, batch)
    except (BackendRefused, ValueError) as error:
        recorder.take()
        return {"refuses": str(error)}
    return {
        function: {name: plain(name, value, call) for name, value in call.items()}
        for function, call in recorder.take().items()
    }


def differences(stock: dict[str, Any], adapter: dict[str, Any]) -> dict[str, Any]:
    """Arguments that differ: name -> [vLLM's, ours]."""
    if "refuses" in stock or "refuses" in adapter:
        pair = [stock.get("refuses"), adapter.get("refuses")]
        return {} if None not in pair else {"refuses": pair}
    found: dict[str, Any] = {}
    for function in sorted(stock.keys() | adapter.keys()):
        if function not in stock or function not in adapter:
            found[function] = [function in stock, function in adapter]
            continue
        left, right = stock[function], adapter[function]
        for name in left:
            if left[name] != right[name]:
                found[f"{function}.{name}"] = [left[name], right[name]]
    return found


def main() -> None:
    """Print a JSON line a case."""
    seed, count = int(sys.argv[1]), int(sys.argv[2])
    machine = Machine(arch=ARCH, release=RELEASE, abort="raise", cus=0)
    install(machine)
    recorder = Recorder(sys.modules)
    patch_stock()
    rng = random.Random(seed)  # noqa: S311 - it draws batches, not secrets
    torch.manual_seed(seed)
    for _ in range(count):
        case = draw(rng)
        batch = Batch(case, rng)
        stock = outcome(theirs, case, batch, recorder)
        adapter = outcome(ours, case, batch, recorder)
        line = {
            "case": asdict(case),
            "served": "refuses" not in stock and "refuses" not in adapter,
            "differs": differences(stock, adapter),
        }
        sys.stdout.write(json.dumps(line) + "\n")


def patch_stock() -> None:
    """Let vLLM's module run where there is no GPU, its decisions left alone.

    The kernel that expands the table is Triton's and the operator is a registered
    one; both get a Python form here. Everything that decides an argument is vLLM's.
    """
    os.environ["VLLM_ROCM_AITER_MLA_ASM_PADDING"] = "asm"  # no Gluon: see the docs
    from vllm import _aiter_ops
    from vllm.v1.attention.backends.mla import rocm_aiter_mla as stock

    class Expand:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            def launch(out, table, *strided: Any, **sizes: Any) -> None:
                indptr = strided[2]
                page = sizes["KERNEL_BLOCK_SIZE"]
                for request in range(grid[0]):
                    first, last = indptr[request : request + 2].tolist()
                    token = torch.arange(last - first)
                    block = table[request][token // page]
                    out[first:last] = (block * page + token % page).int()

            return launch

    def operator(q, kv_buffer, o, sm_scale, qo_indptr, max_q, *paged, **more) -> None:
        _aiter_ops._rocm_aiter_mla_decode_fwd_impl(
            q, kv_buffer, o, qo_indptr, max_q, *paged, sm_scale=sm_scale, **more
        )

    stock._expand_page_indices_kernel = Expand()
    stock.rocm_aiter_ops.mla_decode_fwd = operator


if __name__ == "__main__":
    main()
