# ruff: noqa: ARG001 - the fakes keep the library's parameter names
"""Which copy is called, and how: by what the module offers, always by keyword."""

import subprocess
import sys
import types

import pytest
import torch

from mla_decode import DeviceInfo
from mla_decode_cuda_flashmla import backend, library
from mla_decode_cuda_flashmla.inspection import LibraryRefused, inspect_module
from mla_decode_cuda_flashmla.simulator import sched_meta_api, tile_metadata_api


def module(name="flash_mla", **functions):
    made = types.ModuleType(name)
    for key, value in functions.items():
        setattr(made, key, value)
    return made


def refusal_of(found):
    with pytest.raises(LibraryRefused) as refused:
        inspect_module(found)
    return refused.value.refusal


def recorded_decode(calls):
    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
    ):
        calls.append({"softmax_scale": softmax_scale, "causal": causal})
        shape = (*q.shape[:3], head_dim_v)
        return q.new_zeros(shape), q.new_zeros(
            (q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32
        )

    return flash_mla_with_kvcache


def plan_with_heads(cache_seqlens, num_heads_per_head_k, num_heads_k):
    return ("heads", num_heads_per_head_k), num_heads_k


def plan_with_tokens(
    cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None
):
    return ("tokens", num_q_tokens_per_head_k), num_heads_k


def plan_of_nothing(*args, **kwargs):
    assert args == ()
    assert kwargs == {}
    return "object", None


@pytest.mark.parametrize(
    ("plan", "schedule"),
    [
        (plan_with_heads, (("heads", 48), 1)),
        (plan_with_tokens, (("tokens", 48), 1)),
        (plan_of_nothing, "object"),
    ],
)
def test_the_planner_is_called_as_its_signature_asks(plan, schedule):
    """DRIFT-01: a renamed keyword broke keyword callers."""
    found = inspect_module(
        module(get_mla_metadata=plan, flash_mla_with_kvcache=recorded_decode([]))
    )
    assert found.dense.plan(torch.ones(2, dtype=torch.int32), 48) == schedule


def test_an_unknown_planner_is_refused_with_the_parameters_found():
    def get_mla_metadata(lens, rows, kv_heads):
        raise NotImplementedError

    reason = refusal_of(
        module(
            get_mla_metadata=get_mla_metadata,
            flash_mla_with_kvcache=recorded_decode([]),
        )
    )
    assert str(reason.code) == "import"
    assert "lens, rows, kv_heads" in reason.got
    assert "cache_seqlens" in reason.allowed


def test_an_unknown_decode_is_refused_with_the_parameters_found():
    def flash_mla_with_kvcache(q, cache):
        raise NotImplementedError

    reason = refusal_of(
        module(
            get_mla_metadata=plan_of_nothing,
            flash_mla_with_kvcache=flash_mla_with_kvcache,
        )
    )
    assert "flash_mla_with_kvcache(q, cache)" in reason.got


def test_a_module_without_the_functions_is_refused_with_what_it_has():
    reason = refusal_of(module(flash_mla_sparse_fwd=plan_of_nothing))
    assert "flash_mla_sparse_fwd" in reason.got


@pytest.mark.parametrize("keeps", [None, False])
def test_the_release_that_dropped_hopper_is_refused_and_the_fix_says_so(keeps):
    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        enable_batch_invariant=False,
    ):
        raise NotImplementedError

    functions = {} if keeps is None else {"has_legacy": lambda: keeps}
    reason = refusal_of(
        module(
            get_mla_metadata=plan_of_nothing,
            flash_mla_with_kvcache=flash_mla_with_kvcache,
            **functions,
        )
    )
    assert str(reason.code) == "import"
    assert "no dense decode for Hopper" in reason.message
    assert "2026-09-30" in reason.fix
    assert "tokenspeed-flashmla" in reason.fix


def test_the_mask_and_the_scale_arrive_where_they_belong():
    """DRIFT-03: passed by position, the mask lands on the scale."""
    calls = []
    found = inspect_module(
        module(
            get_mla_metadata=plan_of_nothing,
            flash_mla_with_kvcache=recorded_decode(calls),
        )
    )
    bound = found.dense.bind(
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        "object",
        True,
    )
    bound(
        q=torch.zeros(1, 2, 4, 576),
        k_cache=torch.zeros(1, 64, 1, 576),
        softmax_scale=0.1,
    )
    assert calls == [{"softmax_scale": 0.1, "causal": True}]


def test_the_default_scale_of_the_library_is_not_the_models(kit):
    """SCALE-03: 0.0416667 from the width of q, where the model wants 0.0721688."""
    problem = kit.problem()
    step = kit.step(problem, [40])
    metadata = backend.builder_cls(problem, kit.assumed()).build(step.common)
    with pytest.raises(TypeError, match="softmax_scale"):
        backend.forward(step.q, step.kv, metadata)
    for wrong in (None, True):
        with pytest.raises(ValueError, match="softmax_scale"):
            backend.forward(step.q, step.kv, metadata, softmax_scale=wrong)
    by_default, _ = sched_meta_api.flash_mla_with_kvcache(
        q=step.q.view(1, 1, 16, 576),
        k_cache=step.kv.unsqueeze(2),
        block_table=step.common.block_table_tensor,
        cache_seqlens=step.common.seq_lens,
        head_dim_v=512,
        tile_scheduler_metadata=sched_meta_api.get_mla_metadata()[0],
    )
    ours = backend.forward(step.q, step.kv, metadata, softmax_scale=kit.SCALE).out
    assert not torch.allclose(by_default[0].float(), ours.float(), atol=1e-2)


def test_nothing_installed_is_a_dependency_refusal_with_a_fix(monkeypatch):
    monkeypatch.setattr(library, "MODULES", ("no_such_flash_mla", "no_such.package"))
    library.look_up.cache_clear()
    try:
        with pytest.raises(LibraryRefused) as refused:
            library.library_for(DeviceInfo(vendor="cuda", arch="sm_90"))
    finally:
        library.look_up.cache_clear()
    reason = refused.value.refusal
    assert str(reason.code) == "dependency"
    assert "no_such_flash_mla" in reason.got
    assert "removed dense decode on Hopper" in reason.fix


def test_a_library_that_does_not_import_is_an_import_refusal(monkeypatch, tmp_path):
    (tmp_path / "flash_mla_broken.py").write_text("raise OSError('libcudart.so.13')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "MODULES", ("flash_mla_broken",))
    library.look_up.cache_clear()
    try:
        with pytest.raises(LibraryRefused) as refused:
            library.installed_library()
    finally:
        library.look_up.cache_clear()
    assert str(refused.value.refusal.code) == "import"
    assert "libcudart.so.13" in refused.value.refusal.got


def test_an_installed_copy_is_found_and_reported(monkeypatch, tmp_path):
    source = "from mla_decode_cuda_flashmla.simulator.tile_metadata_api import *\n"
    (tmp_path / "flash_mla_found.py").write_text(source + "__version__ = '1.0'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "MODULES", ("flash_mla_found",))
    library.look_up.cache_clear()
    try:
        found = library.installed_library()
    finally:
        library.look_up.cache_clear()
    assert found.dense.form == "tile_metadata"
    assert (found.distribution, found.version) == ("unknown", "1.0")
    assert found.dense.run is tile_metadata_api.flash_mla_with_kvcache


@pytest.mark.parametrize(
    ("release", "form", "has_fp8"),
    [
        ("sched_meta", "sched_meta", False),
        ("tile_metadata", "tile_metadata", False),
        ("sgl", "sched_meta", True),
    ],
)
def test_an_assumed_release_gives_its_form(kit, release, form, has_fp8):
    found = library.library_for(kit.assumed(release))
    assert found.dense.form == form
    assert (found.fp8 is not None) is has_fp8
    (name,) = backend.library_versions(kit.assumed(release))
    assert "simulated" in name


def test_an_unknown_assumed_release_is_a_version_refusal(kit):
    device = DeviceInfo.assume("sm_90", libraries={"flash-mla": "1999.1"})
    codes = [str(reason.code) for reason in backend.refusals(kit.problem(), device)]
    assert codes == ["version"]
    with pytest.raises(ValueError, match=r"1999\.1"):
        backend.prepare_assumed(device)


def test_the_option_of_the_command_line_assumes_a_release():
    (option,) = backend.cli_options
    device = option.apply(DeviceInfo.assume("sm_90"), "2025.4")
    assert library.library_for(device).dense.form == "tile_metadata"
    assert backend.prepare_assumed(device) == "simulated"
    with pytest.raises(ValueError, match="sm_100"):
        backend.prepare_assumed(DeviceInfo.assume("sm_100"))


def test_importing_the_backend_imports_no_library_and_no_simulator():
    code = (
        "import sys\n"
        "from mla_decode_cuda_flashmla import backend\n"
        "names = ('flash_mla', 'vllm', 'triton', "
        "'mla_decode_cuda_flashmla.simulator')\n"
        "loaded = [name for name in names if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_of_two_distributions_that_claim_the_name_the_loaded_one_is_reported(
    monkeypatch, tmp_path
):
    for name in ("first_copy", "second_copy"):
        site = tmp_path / name
        package = site / "flash_mla_claimed"
        package.mkdir(parents=True)
        source = "from mla_decode_cuda_flashmla.simulator.tile_metadata_api import *\n"
        (package / "__init__.py").write_text(source)
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (info / "top_level.txt").write_text("flash_mla_claimed\n")
        monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(library, "MODULES", ("flash_mla_claimed",))
    library.look_up.cache_clear()
    try:
        assert library.installed_library().distribution == "second_copy"
    finally:
        library.look_up.cache_clear()
