"""A child process: decodes coverage cells on a simulated AITER that really aborts.

Arguments: arch, release, ``lse`` or ``plain``, and the step between cells.
"""

import sys
from collections import Counter

import torch

from mla_decode import (
    DecodeProblem,
    DeviceInfo,
    Mask,
    MLADecoder,
    PagedLatentCache,
    survey,
)
from mla_decode.cli.coverage import DTYPES, HEADS, QUERY_LENS
from mla_decode.dtypes import torch_dtype
from mla_decode.reference.oracle import decode_oracle
from mla_decode_rocm_aiter.simulator import Machine, install

SCALE = 192**-0.5
TOLERANCE = {"bf16": 1e-2, "fp8": 8e-2}
"""Relative error; a wrong mask over these few keys is past 0.3."""


def decode_cell(device, num_heads, query_len, dtypes, *, needs_lse):
    """Decode one cell; returns its outcome, after comparing it with the oracle."""
    q_dtype, kv_dtype = dtypes
    problem = DecodeProblem(
        num_q_heads=num_heads,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        page_size=16,
        query_lens=frozenset({query_len}),
        masks=frozenset({Mask.NON_CAUSAL}),
        needs_lse=needs_lse,
        max_num_reqs=2,
        max_model_len=64,
    )
    found = survey(problem, device, "rocm_aiter", "exact")
    if found.selection is None:
        # An AITER too old for the block itself is also named so: it fails closed.
        (reasons,) = found.refused.values()
        codes = {str(reason.code) for reason in reasons}
        if "lse" not in codes:
            raise SystemExit(f"{problem}: refused with {codes}")
        return "refused"
    decoder = MLADecoder(problem, "rocm_aiter", "exact", device=device)
    generator = torch.Generator().manual_seed(num_heads * 31 + query_len)
    cache = PagedLatentCache(12, 16, dtype=torch_dtype(kv_dtype, device))
    lens = (query_len + 10, 37)
    for request, seq_len in enumerate(lens):
        cache.allocate(request)
        cache.append(request, [torch.randn(seq_len, 576, generator=generator)])
    common = cache.batch((0, 1), (query_len, query_len), causal=False)
    q = torch.randn(2 * query_len, num_heads, 576, generator=generator)
    q = q.to(torch_dtype(q_dtype, device))
    one = torch.ones(1)
    output = decoder.run(
        q,
        cache.layers[0],
        decoder.plan(common),
        softmax_scale=SCALE,
        q_scale=one if q_dtype == "fp8" else None,
        kv_scale=one if kv_dtype == "fp8" else None,
    )
    truth, truth_lse = decode_oracle(
        q,
        cache.layers[0],
        common.block_table_tensor,
        common.seq_lens,
        common.query_start_loc_cpu,
        causal=False,
        softmax_scale=SCALE,
    )
    error = float((output.out.double() - truth).norm() / truth.norm())
    cell = (num_heads, query_len, dtypes, decoder.selection.plan.kind)
    if not error < TOLERANCE[q_dtype]:
        raise SystemExit(f"{cell}: relative error {error:.3g}")
    if needs_lse:
        worst = float((output.lse.double() - truth_lse).abs().max())
        if not worst < 1e-2:
            raise SystemExit(f"{cell}: LSE off by {worst:.3g}")
    return decoder.selection.plan.kind


def main():
    arch, release, lse, step = sys.argv[1:]
    torch.set_num_threads(1)
    device = DeviceInfo.assume(arch, libraries={"amd-aiter": release})
    cells = [(h, q, d) for d in DTYPES for h in HEADS for q in QUERY_LENS]
    outcomes = Counter()
    for cell in cells[:: int(step)]:
        # A machine remembers every address that it was given: a new one a cell.
        install(Machine(arch=arch, release=release, abort="native", cus=16))
        outcomes[decode_cell(device, *cell, needs_lse=lse == "lse")] += 1
    sys.stdout.write(f"{sum(outcomes.values())} cells: {dict(outcomes)}\n")


if __name__ == "__main__":
    main()
