from __future__ import annotations

from dataclasses import asdict
from importlib import resources

import numpy as np
import pytest
import torch

from mla_decode.demo import weights
from mla_decode.demo.drafter import BlockDrafter
from mla_decode.demo.model import TargetModel
from mla_decode.demo.shape import ModelShape

TINY = ModelShape(vocab_size=8, model_width=8, num_heads=1, num_layers=1, mlp_width=8)


@pytest.fixture
def tiny():
    torch.manual_seed(0)
    models = TargetModel(TINY), BlockDrafter(TINY)
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        model.requires_grad_(requires_grad=False)
    return models


def test_the_shipped_data_files_stay_within_four_megabytes():
    files = [
        path
        for path in resources.files("mla_decode.demo").iterdir()
        if path.is_file() and not path.name.endswith(".py")
    ]
    sizes = {path.name: len(path.read_bytes()) for path in files}
    assert weights.WEIGHTS_FILE in sizes
    assert sum(sizes.values()) <= weights.MAX_WEIGHTS_BYTES


def test_shipped_matrices_are_int8_and_their_record_names_the_run():
    shipped = resources.files("mla_decode.demo") / weights.WEIGHTS_FILE
    with shipped.open("rb") as file, np.load(file) as archive:
        scaled = [name for name in archive.files if f"{name}.scale" in archive.files]
        assert {archive[name].dtype for name in scaled} == {np.dtype(np.int8)}
    _, _, about = weights.load_weights()
    assert about["target_steps"] > 0
    assert about["drafter_steps"] > 0
    assert about["recipe"]["seed"]
    assert len(about["corpus"]["sha256"]) == 16


def test_weights_come_back_as_their_int8_form_stands_for(tiny, tmp_path):
    target, drafter = tiny
    path = tmp_path / "tiny.npz"
    weights.save_weights(path, target, drafter, {"shape": asdict(TINY)})
    read_target, read_drafter, _ = weights.load_weights(path)
    for written, read in ((target, read_target), (drafter, read_drafter)):
        weights.round_to_int8(written)
        for name, tensor in written.state_dict().items():
            assert torch.equal(read.state_dict()[name], tensor), name


def test_rounding_moves_no_number_by_more_than_half_a_step():
    matrix = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    matrix[3] = 0
    codes, scales = weights.quantise(matrix)
    assert np.abs(codes).max() == 127
    assert (np.abs(codes * scales - matrix.numpy()) <= scales * 0.5001).all()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(weights.WeightsError) as caught:
        weights.load_weights(tmp_path / "none.npz")
    assert caught.value.got.endswith("none.npz")


def test_another_models_file_is_refused(tiny, tmp_path):
    path = tmp_path / "tiny.npz"
    wider = asdict(ModelShape(**{**asdict(TINY), "mlp_width": 16}))
    weights.save_weights(path, *tiny, {"shape": wider})
    with pytest.raises(weights.WeightsError, match=r"gate\.weight"):
        weights.load_weights(path)
