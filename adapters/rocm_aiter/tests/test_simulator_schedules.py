import hashlib
import importlib
import json
from pathlib import Path

import pytest
import torch
from aiter_calls import make_batch, make_schedule

from mla_decode_rocm_aiter.simulator import SimulatedAbort, simulated

GOLDENS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "schedules.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]


def test_holds_enough_goldens():
    assert len(GOLDENS) == 167


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden["name"])
def test_schedules_equal_those_of_aiters_planner(golden):
    """Digests are of AITER's own planner (0.1.20.post1), compiled and run on a CPU."""
    with simulated(golden["arch"], cus=golden["cus"]) as machine:
        lib = importlib.import_module("aiter")

        size, lens = golden["page_size"], golden["seq_lens"]
        dtypes = [
            machine.fp8 if word == "fp8" else getattr(lib.dtypes, word)
            for word in golden["dtypes"].split()
        ]
        shapes = lib.get_mla_metadata_info_v1(
            golden["sized_for"],
            golden["q"],
            golden["heads"],
            *dtypes,
            False,
            max_split_per_batch=golden["max_split"],
        )
        meta, indptr, works, reduce_indptr, final, partial = (
            torch.full((shape,) if isinstance(shape, int) else shape, 0, dtype=dtype)
            for shape, dtype in shapes
        )
        final.fill_(-1)
        blocks = golden.get("query_lens") or [golden["q"]] * len(lens)
        lib.get_mla_metadata_v1(
            torch.tensor([0, *torch.tensor(blocks).cumsum(0)], dtype=torch.int32),
            torch.tensor(
                [0, *torch.tensor([-(-n // size) for n in lens]).cumsum(0)],
                dtype=torch.int32,
            ),
            torch.tensor(
                [(n - 1) % size + 1 if n else 1 for n in lens], dtype=torch.int32
            ),
            golden["heads"],
            1,
            golden["causal"],
            meta,
            works,
            indptr,
            reduce_indptr,
            final,
            partial,
            page_size=size,
            kv_granularity=golden["granularity"],
            max_seqlen_qo=golden["q"],
            uni_seqlen_qo=golden["uniform_q"],
            max_split_per_batch=golden["max_split"],
            dtype_q=dtypes[0],
            dtype_kv=dtypes[1],
        )
    observed = {
        "works": works[: int(indptr[-1])].tolist(),
        "work_indptr": indptr.tolist(),
        "reduce_indptr": reduce_indptr.tolist(),
        "final_map": [None if rows[0] < 0 else rows for rows in final.tolist()],
        "partial_map": partial[: int(reduce_indptr[-1])].tolist(),
        "shapes": [
            indptr.shape[0],
            list(works.shape),
            reduce_indptr.shape[0],
            list(final.shape),
            partial.shape[0],
        ],
    }
    assert len(observed["works"]) == golden["works"]
    text = json.dumps(observed, separators=(",", ":"))
    assert hashlib.sha256(text.encode()).hexdigest()[:24] == golden["digest"]


def test_pointers_lead_to_the_buffers():
    with simulated() as machine:
        lib = importlib.import_module("aiter")

        batch = make_batch([40, 100], 1, 16)
        schedule = make_schedule(lib, batch, 1, 16)
        first, second = schedule["work_meta_data"].view(torch.int64).tolist()
        assert machine.memory.read(first, "") is schedule["work_indptr"]
        assert machine.memory.read(second, "") is schedule["work_info_set"]


@pytest.mark.parametrize(
    ("release", "error"),
    [("0.1.19.post2", RuntimeError), ("0.1.20.post1", SimulatedAbort)],
)
def test_a_schedule_for_24_heads_ends_as_the_release_ends(release, error):
    with simulated("gfx942", release):
        lib = importlib.import_module("aiter")

        batch = make_batch([40], 1, 24)
        with pytest.raises(RuntimeError) as caught:
            make_schedule(lib, batch, 1, 24)
        assert caught.type is error


def test_omitted_dtypes_give_the_schedule_of_bf16():
    with simulated("gfx950") as machine:
        lib = importlib.import_module("aiter")

        batch = make_batch([900, 800], 2, 48, dtype=machine.fp8)
        right = make_schedule(lib, batch, 2, 48)
        wrong = make_schedule(lib, batch, 2, 48, dtype_q=None, dtype_kv=None)
        assert right["work_info_set"][:, 0].max() == 5
        assert wrong["work_info_set"][:, 0].max() == 1


def test_a_missing_uniform_length_can_empty_the_schedule():
    with simulated("gfx950"):
        lib = importlib.import_module("aiter")

        batch = make_batch([900, 800], 8, 128)
        found = make_schedule(lib, batch, 8, 128, uni_seqlen_qo=-1)
        assert int(found["work_indptr"][-1]) == 0


def test_the_parallel_planner_forgets_an_empty_request():
    lens = [4000, 0, 0, 3000, 0, 64]
    with simulated("gfx950", "0.1.20.post1", cus=2):
        lib = importlib.import_module("aiter")

        batch = make_batch(lens, 1, 16)
        found = make_schedule(lib, batch, 1, 16)
        works = int(found["work_indptr"][-1])
        assert set(found["work_info_set"][:works, 0].tolist()) != set(range(6))
