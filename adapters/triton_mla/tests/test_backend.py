"""The backend object: light, honest about archs, and precise in what it refuses."""

import json
import subprocess
import sys

import pytest

from mla_decode import (
    ArgumentError,
    BackendRefused,
    Dcp,
    DecodeProblem,
    DeviceInfo,
    Mask,
)
from mla_decode_triton import TritonMLABackend, backend, chosen_backend
from mla_decode_triton.tiles import ARCH_TILES

GFX942, SM_90 = DeviceInfo.assume("gfx942"), DeviceInfo.assume("sm_90")


def problem_of(**fields):
    fields.setdefault("num_q_heads", 16)
    return DecodeProblem(**fields)


def codes(device, **fields):
    return [str(r.code) for r in backend.refusals(problem_of(**fields), device)]


def test_importing_and_asking_it_loads_no_triton_and_starts_no_gpu():
    script = (
        "import json, sys\n"
        "from mla_decode import DecodeProblem, DeviceInfo\n"
        "from mla_decode_triton import backend\n"
        "backend.refusals(DecodeProblem(num_q_heads=16), DeviceInfo.assume('gfx942'))\n"
        "gpu = 'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized()\n"
        "print(json.dumps(['triton' in sys.modules, gpu]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == [False, False]


@pytest.mark.parametrize("arch", ARCH_TILES)
@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 128])
def test_serves_both_masks_everywhere(arch, page_size):
    for query_len in (1, 2, 7, 32):
        assert not codes(
            DeviceInfo.assume(arch),
            query_lens=frozenset({query_len}),
            masks=frozenset(Mask),
            page_size=page_size,
            needs_lse=True,
            graphs=True,
        )


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"num_q_heads": 129}, "num_heads"),
        ({"query_lens": frozenset({33})}, "query_len"),
        ({"page_size": 256}, "page_size"),
        ({"q_dtype": "fp8", "kv_dtype": "fp8"}, "dtype"),
        ({"q_dtype": "fp16", "kv_dtype": "fp8"}, "kv_dtype"),
        ({"kv_dtype": "fp16"}, "kv_dtype"),
        (
            {"query_lens": frozenset({4}), "dcp": Dcp(world=2)},
            "dcp",
        ),
    ],
)
def test_refuses_what_it_has_no_kernel_for(fields, code):
    assert codes(GFX942, **fields) == [code]


def test_refuses_fp8_where_the_architecture_cannot_widen_it():
    assert codes(DeviceInfo.assume("sm_80"), kv_dtype="fp8") == ["kv_dtype"]


def test_refuses_an_unknown_architecture_and_a_cpu():
    assert codes(DeviceInfo.assume("gfx90a")) == ["arch"]
    assert codes(DeviceInfo.assume("cpu")) == ["arch"]


def test_a_builder_made_by_hand_refuses_with_the_same_reasons():
    with pytest.raises(BackendRefused) as refused:
        backend.builder_cls(problem_of(num_q_heads=200), SM_90)
    assert refused.value.codes == {"num_heads"}


def test_a_missing_triton_is_one_more_reason_on_real_devices(monkeypatch):
    module = sys.modules[TritonMLABackend.__module__]
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    real = DeviceInfo(vendor="cuda", arch="sm_90")
    assert codes(real, page_size=256) == ["page_size", "dependency"]
    assert codes(SM_90) == []
    with pytest.raises(ArgumentError, match="needs Triton"):
        backend.prepare_assumed(SM_90)


def test_says_what_ran_where():
    assert chosen_backend("portable").evidence(SM_90) == "interpreted"
    assert backend.evidence(SM_90).startswith("interpreted")
    assert "never on AMD" in backend.evidence(GFX942)
    assert "never on AMD" in backend.evidence(DeviceInfo(vendor="rocm", arch="gfx942"))
    card = DeviceInfo(vendor="cuda", arch="sm_90")
    assert chosen_backend("portable").evidence(card) == "hardware"
    assert backend.prepare_assumed(GFX942) == "interpreted"
    with pytest.raises(ArgumentError, match="gfx90a"):
        backend.prepare_assumed(DeviceInfo.assume("gfx90a"))


def test_non_causal_blocks_are_a_comparison():
    assert backend.supports_non_causal(GFX942)
    assert not backend.supports_non_causal(DeviceInfo.assume("gfx90a"))


def test_cost_counts_a_walk_for_each_tile_of_rows():
    fields = {"query_lens": frozenset({8}), "max_num_reqs": 64}
    cost = backend.cost(problem_of(**fields), SM_90)
    assert (cost.kv_walks, cost.rows, cost.launches) == (2, 128, 1)
    small = backend.cost(problem_of(max_num_reqs=4), SM_90)
    assert (small.kv_walks, small.rows, small.launches) == (1, 16, 2)
    names = backend.kernel_names(problem_of(max_num_reqs=4), SM_90)
    assert names == ("decode_kernel", "merge_kernel")
    assert small.workspace_bytes == backend.workspace_bytes(
        problem_of(max_num_reqs=4), SM_90
    )
