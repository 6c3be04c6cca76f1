import numpy as np
import pytest
import torch

from mla_decode import Mask, MaskError, normalise_causal


@pytest.mark.parametrize(
    ("causal", "expected"),
    [
        (True, True),
        (False, False),
        (np.True_, True),
        (np.bool_(False), False),
        (torch.tensor(True), True),
        (torch.tensor(False), False),
        (torch.tensor([True, True]), True),
        (torch.zeros((2, 3), dtype=torch.bool), False),
    ],
)
def test_reads_every_form_that_names_one_mask(causal, expected):
    assert normalise_causal(causal) is expected


@pytest.mark.parametrize(
    ("causal", "got"),
    [
        (None, "NoneType"),
        (0, "int 0"),
        (1, "int 1"),
        ("causal", "str"),
        (np.array(True), "ndarray"),
        (torch.tensor(1), "int64"),
        (torch.tensor([True, False]), "bool (2,)"),
        (torch.zeros(0, dtype=torch.bool), "(0,)"),
        (torch.empty(1, dtype=torch.bool, device="meta"), "meta"),
    ],
)
def test_refuses_what_names_no_mask_or_both(causal, got):
    with pytest.raises(MaskError) as caught:
        normalise_causal(causal)
    assert got in caught.value.got
    assert "bool" in caught.value.allowed
    assert "False for a block" in caught.value.fix


def test_a_mask_prints_as_its_word():
    assert f"{Mask.CAUSAL} {Mask.NON_CAUSAL}" == "causal non_causal"
