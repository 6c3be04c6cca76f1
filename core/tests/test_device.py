import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from mla_decode import ArgumentError, DeviceInfo, detect_device
from mla_decode.device import _describe, as_device_info, vendor_of
from mla_decode.dtypes import fp8_dtype, torch_dtype


@pytest.mark.parametrize(
    ("arch", "vendor"),
    [
        ("cpu", "cpu"),
        ("sm_90", "cuda"),
        ("sm_100", "cuda"),
        ("sm_90a", "cuda"),
        ("gfx942", "rocm"),
        ("gfx90a", "rocm"),
    ],
)
def test_finds_the_vendor_of_an_architecture(arch, vendor):
    device = DeviceInfo.assume(arch)
    assert (vendor_of(arch), device.vendor) == (vendor, vendor)
    assert device.assumed is (arch != "cpu")
    assert device.torch_device == "cpu"


@pytest.mark.parametrize("arch", ["", "h200", "sm90", "gfx", "SM_90", "cpu0"])
def test_refuses_a_name_that_no_vendor_uses(arch):
    with pytest.raises(ArgumentError, match="known form"):
        DeviceInfo.assume(arch)


def test_refuses_an_architecture_of_another_vendor():
    with pytest.raises(ArgumentError) as caught:
        DeviceInfo(vendor="rocm", arch="sm_90")
    assert caught.value.got == "rocm sm_90"


def test_a_present_gpu_is_where_its_tensors_live():
    device = DeviceInfo(vendor="cuda", arch="sm_90", index=3)
    assert device.torch_device == "cuda:3"
    assert device.as_dict()["index"] == 3


def test_is_a_value_that_keys_a_cache_and_travels_between_processes():
    device = DeviceInfo.assume("gfx950", libraries={"amd-aiter": "0.1.20"})
    same = DeviceInfo.assume("gfx950", libraries={"amd-aiter": "0.1.20"})
    assert {device: 1}[same] == 1
    assert pickle.loads(pickle.dumps(device)) == device  # noqa: S301 - our own bytes
    assert copy.deepcopy(device) == device
    with pytest.raises(TypeError):
        device.libraries["amd-aiter"] = "0"


def test_detects_the_cpu():
    assert detect_device("cpu") == DeviceInfo.assume("cpu")
    assert detect_device(torch.device("cpu")).vendor == "cpu"


def test_without_an_accelerator_the_cpu_is_found(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect_device().arch == "cpu"


@pytest.mark.parametrize("name", ["cuda", "cuda:1", 0])
def test_refuses_a_gpu_that_is_not_there(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ArgumentError, match="no such GPU"):
        detect_device(name)


def test_refuses_an_index_past_the_gpus_that_are_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError) as caught:
        detect_device("cuda:2")
    assert caught.value.allowed == "cpu, cuda:0, cuda:1"


def test_refuses_a_kind_of_device_that_no_backend_runs_on():
    with pytest.raises(ArgumentError, match="kind of device"):
        detect_device("meta")


@pytest.mark.parametrize("name", ["gfx942", 1.5])
def test_refuses_a_name_that_torch_does_not_know(name):
    with pytest.raises(ArgumentError) as caught:
        detect_device(name)
    assert "DeviceInfo.assume" in caught.value.fix
    assert caught.value.__cause__ is not None


def test_takes_a_description_as_it_is():
    device = DeviceInfo.assume("gfx942")
    assert as_device_info(device) is device
    assert as_device_info("cpu").arch == "cpu"


def test_fp8_is_fnuz_on_gfx94x_alone():
    assert fp8_dtype(DeviceInfo.assume("gfx942")) == torch.float8_e4m3fnuz
    for arch in ("gfx950", "sm_90", "cpu"):
        assert torch_dtype("fp8", DeviceInfo.assume(arch)) == torch.float8_e4m3fn
    assert torch_dtype("bf16", DeviceInfo.assume("gfx942")) == torch.bfloat16


@pytest.mark.parametrize(
    ("properties", "is_rocm", "vendor", "arch"),
    [
        ({"major": 9, "minor": 0}, False, "cuda", "sm_90"),
        ({"major": 10, "minor": 0}, False, "cuda", "sm_100"),
        ({"gcnArchName": "gfx942:sramecc+:xnack-"}, True, "rocm", "gfx942"),
        ({"gcnArchName": "gfx950"}, True, "rocm", "gfx950"),
    ],
)
def test_reads_a_gpu_s_architecture_as_torch_spells_it(
    properties, is_rocm, vendor, arch
):
    found = _describe(
        SimpleNamespace(name="a card", **properties), index=3, is_rocm=is_rocm
    )
    assert found == DeviceInfo(vendor=vendor, arch=arch, index=3, name="a card")
    assert found.torch_device == "cuda:3"
