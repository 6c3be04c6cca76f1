from __future__ import annotations

import pytest
import torch

from mla_decode.demo.attention import Serving
from mla_decode.demo.generate import Generator
from mla_decode.demo.run import PROMPT_LEN
from mla_decode.demo.text import held_out_prompts
from mla_decode.demo.weights import load_weights
from mla_decode.device import DeviceInfo


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def models():
    return load_weights()[:2]


@pytest.fixture(scope="session")
def serving():
    return Serving(device=DeviceInfo.assume("cpu"))


@pytest.fixture(scope="session")
def prompts():
    cut = held_out_prompts(8, prompt_bytes=PROMPT_LEN, continuation_bytes=96)
    return torch.tensor([list(prompt.text) for prompt in cut])


@pytest.fixture
def generator(models, serving):
    return Generator(*models, serving, draft_len=6, num_reqs=8)
