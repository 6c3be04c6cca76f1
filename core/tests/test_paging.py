import pytest
import torch

from mla_decode import ArgumentError, BatchError, PagedLatentCache


def latents(count, value):
    return torch.full((count, 576), float(value))


def test_a_request_takes_pages_as_it_grows_and_gives_them_back():
    cache = PagedLatentCache(5, 4)
    cache.allocate("a")
    assert (cache.seq_len("a"), cache.num_free_pages) == (0, 5)
    cache.extend("a", 4)
    assert cache.num_free_pages == 4
    cache.extend("a", 1)
    assert (cache.seq_len("a"), cache.num_free_pages) == (5, 3)
    cache.truncate("a", 4)
    assert (cache.seq_len("a"), cache.num_free_pages) == (4, 4)
    cache.free("a")
    assert cache.num_free_pages == 5
    with pytest.raises(BatchError, match="none is open"):
        cache.seq_len("a")


def test_latents_land_in_the_slots_of_their_tokens_on_every_layer():
    cache = PagedLatentCache(4, 4, num_layers=2)
    cache.allocate("a")
    cache.allocate("b")
    cache.append("a", [latents(3, 1), latents(3, 10)])
    cache.append("b", [latents(2, 2), latents(2, 20)])
    cache.append("a", [latents(2, 3), latents(2, 30)])
    batch = cache.batch(["a", "b"], [1, 1])
    table = batch.block_table_tensor
    for layer, factor in zip(cache.layers, (1, 10), strict=True):
        pages = layer[table[0].long()].flatten(0, 1)[:5, 0]
        assert pages.tolist() == [factor * v for v in (1, 1, 1, 3, 3)]
        assert layer[table[1, 0].long()][:2, 0].tolist() == [2 * factor] * 2


def test_a_batch_describes_blocks_that_are_written_already():
    cache = PagedLatentCache(4, 4)
    for name, count in (("a", 5), ("b", 2)):
        cache.allocate(name)
        cache.extend(name, count)
    batch = cache.batch(["b", "a"], [2, 2], causal=False)
    assert batch.query_start_loc_cpu.tolist() == [0, 2, 4]
    assert batch.seq_lens.tolist() == [2, 5]
    assert batch.block_table_tensor[0, 1] == -1
    assert (batch.max_query_len, batch.max_seq_len, batch.causal) == (2, 5, False)


def test_a_batch_keeps_the_contract_of_a_builder(plain_builder, cpu, make_step):
    cache = PagedLatentCache(8, 16)
    cache.allocate(0)
    cache.extend(0, 30)
    problem = make_step(query_len=2, max_model_len=64).problem
    metadata = plain_builder(problem, cpu, validate="device").build(
        cache.batch([0], [2])
    )
    assert metadata.query_len == 2


def test_takes_nothing_where_pages_are_too_few():
    cache = PagedLatentCache(2, 4)
    cache.allocate("a")
    with pytest.raises(BatchError, match="too few free pages") as caught:
        cache.extend("a", 9)
    assert (caught.value.got, caught.value.allowed) == (
        "3 pages for 9 tokens of 'a'",
        "2 free pages",
    )
    assert (cache.seq_len("a"), cache.num_free_pages) == (0, 2)


def test_refuses_what_would_lose_tokens_or_requests():
    cache = PagedLatentCache(2, 4)
    cache.allocate("a")
    cache.extend("a", 3)
    with pytest.raises(BatchError, match="open already"):
        cache.allocate("a")
    with pytest.raises(BatchError, match="less than no token"):
        cache.extend("a", -1)
    for length in (-1, 4):
        with pytest.raises(BatchError, match="cut within its tokens"):
            cache.truncate("a", length)
    with pytest.raises(BatchError) as caught:
        cache.free("b")
    assert caught.value.allowed == "'a'"
    with pytest.raises(ArgumentError, match="do not fit the slots"):
        cache.write(0, torch.tensor([0]), latents(2, 0))


@pytest.mark.parametrize(
    ("requests", "blocks"), [([], []), (["a"], [4]), (["a"], [0]), (["a"], [1, 1])]
)
def test_a_batch_needs_a_block_of_each_requests_own_tokens(requests, blocks):
    cache = PagedLatentCache(2, 4)
    cache.allocate("a")
    cache.extend("a", 3)
    with pytest.raises(BatchError, match="own tokens"):
        cache.batch(requests, blocks)


def test_latents_are_cast_to_the_caches_dtype():
    cache = PagedLatentCache(1, 4, dtype=torch.float16)
    cache.allocate("a")
    cache.append("a", [latents(1, 2)])
    assert cache.layers[0].dtype == torch.float16
    assert cache.layers[0].sum() == 2 * 576


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_an_fp8_cache_saturates_and_has_no_negative_zero_of_its_own(dtype):
    cache = PagedLatentCache(1, 4, dtype=dtype)
    cache.allocate("a")
    largest = torch.finfo(dtype).max
    for value in (1e6, -1e6, -1e-5):
        cache.append("a", [latents(1, value)])
    rows = cache.layers[0][0, :3, 0].float()
    assert rows.tolist() == [largest, -largest, 0.0]
