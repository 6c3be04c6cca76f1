"""Plans over AITER: the cheapest of all rewrites, few of them asked, never stale."""

import sys

import hypothesis.strategies as st
import pytest
from aiter_install import install_aiter, table_csv
from aiter_steps import device_of, problem_of
from hypothesis import given, settings

from mla_decode import DecodeProblem, DeviceInfo, Mask
from mla_decode.lowering import plan_exact
from mla_decode.lowering.planner import price
from mla_decode.lowering.rewrites import native, rewrites
from mla_decode_rocm_aiter import backend, known_releases
from mla_decode_rocm_aiter.facts import find_facts
from mla_decode_rocm_aiter.workspace import num_splits, split_counts

MLA = "def mla_decode_fwd(q, kv_buffer, o, causal=True): ...\n"
HARDWARE = DeviceInfo(vendor="rocm", arch="gfx950")


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install an AITER below a folder of its own; import it anew at each call."""

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "aiter"]:
            del sys.modules[name]

    def run(number, **words):
        forget()
        site = tmp_path / str(number)
        install_aiter(site, monkeypatch, "0.1.20.post1", **words)
        (site / "aiter" / "mla.py").write_text(MLA)
        return site

    yield run
    forget()


@settings(max_examples=60, deadline=None)
@given(
    arch=st.sampled_from(("gfx942", "gfx950")),
    release=st.sampled_from(known_releases()),
    heads=st.sampled_from((1, 2, 8, 12, 16, 24, 48, 64, 128)),
    query_len=st.integers(1, 16),
    mask=st.sampled_from(list(Mask)),
    dtypes=st.sampled_from((("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"))),
    needs_lse=st.booleans(),
    graphs=st.booleans(),
)
def test_the_plan_is_the_cheapest_of_all_that_are_not_refused(
    arch, release, heads, query_len, mask, dtypes, needs_lse, graphs
):
    device = device_of(arch, release)
    answers = backend.answers(device)
    problem = DecodeProblem(
        num_q_heads=heads,
        q_dtype=dtypes[0],
        kv_dtype=dtypes[1],
        query_lens={query_len},
        masks={mask},
        needs_lse=needs_lse,
        graphs=graphs,
    )
    ((query_len, mask),) = problem.blocks()
    legal = []
    for rewrite in (
        native(problem, query_len, mask),
        *rewrites(problem, query_len, mask, range(1, 1025)),
    ):
        lowered = rewrite.lowered
        if backend.refusals(lowered, device):
            continue
        ((length, seen),) = lowered.blocks()
        bound = answers.fewest_walks(problem, length, seen, lowered.num_q_heads)
        assert bound is not None
        cost = backend.cost(lowered, device)
        assert bound <= cost.kv_walks
        least = answers.least_bytes(
            problem, length, seen, lowered.num_q_heads, lowered.max_num_reqs
        )
        assert 0 < least <= cost.workspace_bytes + cost.call_bytes
        legal.append(price(rewrite, answers).rank)
    plan = plan_exact(problem, backend, device)
    assert (plan is None) == (not legal)
    if plan is not None:
        assert plan.blocks[0].rank == min(legal)


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("dtypes", ["bf16 bf16", "fp8 fp8", "bf16 fp8"])
def test_few_candidates_are_asked_about(arch, dtypes):
    """Of up to 60 rewrites: the time to plan is the number of those that are asked."""
    answers = backend.answers(device_of(arch))
    asked = []

    class Counting:
        num_q_heads = answers.num_q_heads
        cost = staticmethod(answers.cost)
        fewest_walks = staticmethod(answers.fewest_walks)
        least_bytes = staticmethod(answers.least_bytes)

        def refusals(self, problem):
            asked.append(problem)
            return answers.refusals(problem)

    class Counted:
        answers = staticmethod(lambda _: counting)

    counting = Counting()
    numbers = []
    for heads in (8, 12, 16, 24, 32, 48, 64, 96, 128):
        for query_len in range(2, 17):
            asked.clear()
            problem = problem_of(heads, query_len, dtypes=dtypes, causal=False)
            assert plan_exact(problem, Counted(), device_of(arch)) is not None
            numbers.append(len(asked))
    assert sorted(numbers)[len(numbers) // 2] == 1
    assert max(numbers) <= 4


def test_a_plan_follows_the_environment(monkeypatch):
    problem = problem_of(16, 4, dtypes="fp8 fp8", causal=False)
    device = device_of()
    before = plan_exact(problem, backend, device)
    assert before.kind == "native"
    assert plan_exact(problem, backend, device) is before
    monkeypatch.setenv("AITER_MLA_USE_OPUS", "1")
    assert plan_exact(problem, backend, device).kind != "native"
    monkeypatch.setenv("AITER_MLA_USE_OPUS", "0")
    assert plan_exact(problem, backend, device) is before


def test_a_plan_follows_the_simulated_machine(monkeypatch):
    problem = problem_of(16, 4, causal=False)
    here = DeviceInfo.assume("cpu")
    monkeypatch.setenv("MLA_DECODE_SIMULATE", "rocm_aiter:gfx950:0.1.20.post1")
    assert plan_exact(problem, backend, here).kind == "native"
    monkeypatch.setenv("MLA_DECODE_SIMULATE", "rocm_aiter:gfx942:0.1.20.post1")
    assert plan_exact(problem, backend, here).kind != "native"


def test_an_imported_aiter_is_read_once(install):
    install(1)
    find_facts(HARDWARE)  # imports it
    facts = find_facts(HARDWARE)
    assert facts.release == "0.1.20.post1"
    assert find_facts(HARDWARE) is facts
    assert backend.answers(HARDWARE) is backend.answers(HARDWARE)
    other = find_facts(DeviceInfo(vendor="rocm", arch="gfx942"))
    assert other.arch == "gfx942"


def test_an_aiter_that_is_imported_anew_is_read_anew(install):
    problem = problem_of(16, 8, causal=False)
    install(1)
    assert plan_exact(problem, backend, HARDWARE).kind == "native"
    rows = table_csv("0.1.20.post1", "gfx950").splitlines()
    kept = [row for row in rows if not row.startswith("bf16,bf16,32,1,4,0")]
    install(2, tables={"gfx950": "\n".join(kept) + "\n"})
    assert plan_exact(problem, backend, HARDWARE).kind != "native"


def test_another_folder_of_kernels_is_read_anew(install, monkeypatch):
    site = install(1)
    find_facts(HARDWARE)
    assert str(site) in find_facts(HARDWARE).table.source
    elsewhere = install(2)
    find_facts(HARDWARE)
    monkeypatch.setenv("AITER_META_DIR", str(site))
    assert str(site) in find_facts(HARDWARE).table.source
    monkeypatch.delenv("AITER_META_DIR")
    assert str(elsewhere) in find_facts(HARDWARE).table.source


def test_a_missing_aiter_is_looked_for_again(install):
    problem = problem_of(16, 8, causal=False)
    assert plan_exact(problem, backend, HARDWARE) is None
    install(1)
    assert plan_exact(problem, backend, HARDWARE).kind == "native"


@given(cus=st.integers(1, 400), most=st.integers(1, 600))
def test_the_numbers_of_splits_are_those_of_every_batch(cus, most):
    counted = {num_splits(cus, requests) for requests in range(1, most + 1)}
    assert split_counts(cus, most) == tuple(sorted(counted))
