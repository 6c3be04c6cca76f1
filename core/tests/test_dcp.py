import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_decode import Dcp
from mla_decode.dcp import local_seq_lens


@given(
    seq_lens=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    world=st.integers(1, 8),
    interleave=st.integers(1, 5),
)
def test_every_token_lives_on_exactly_the_rank_that_the_deal_gives_it(
    seq_lens, world, interleave
):
    tensor = torch.tensor(seq_lens, dtype=torch.int32)
    for rank in range(world):
        dcp = Dcp(world=world, rank=rank, interleave=interleave)
        expected = [
            sum((token // interleave) % world == rank for token in range(seq_len))
            for seq_len in seq_lens
        ]
        assert [local_seq_lens(seq_len, dcp) for seq_len in seq_lens] == expected
        local = local_seq_lens(tensor, dcp)
        assert local.tolist() == expected
        assert local.dtype == torch.int32
