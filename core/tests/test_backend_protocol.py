"""The Backend protocol: what types say of it, and that the base class keeps it."""

import inspect
from importlib.util import find_spec
from typing import get_type_hints

import pytest

from mla_decode import Backend, BackendBase
from mla_decode.reference import backend as reference

MEMBERS = sorted(name for name in vars(Backend) if not name.startswith("_"))

CONFORMING = """
from mla_decode import Backend, MLADecodeMetadataBuilder
from mla_decode.reference import backend

chosen: Backend = backend
builder: type[MLADecodeMetadataBuilder] = chosen.builder_cls
reveal_type(chosen.capability)
reveal_type(chosen.forward)
"""

WRONG = """
from mla_decode import Backend, Cost, DecodeProblem, DeviceInfo
from mla_decode.reference import ReferenceBackend


class NoCost:
    name = "no_cost"
    contract = "1.0"


class WrongCost(ReferenceBackend):
    def cost(self, problem: DecodeProblem, device: DeviceInfo) -> int:
        return 1


class WithMask(ReferenceBackend):
    def supports_non_causal(self, device: DeviceInfo, causal: bool) -> bool:
        return causal


first: Backend = NoCost()
second: Backend = WrongCost()
third: Backend = WithMask()

"""


def test_the_protocol_names_what_the_contract_names():
    assert MEMBERS == [
        "builder_cls",
        "capability",
        "cli_options",
        "contract",
        "cost",
        "deterministic",
        "evidence",
        "forward",
        "name",
        "refusals",
        "supports_non_causal",
        "workspace_bytes",
    ]


def test_an_instance_of_the_base_class_keeps_the_protocol(plain_backend):
    assert isinstance(reference, Backend)
    assert isinstance(plain_backend, Backend)
    assert not isinstance(object(), Backend)


@pytest.mark.parametrize(
    "name", ["cost", "evidence", "forward", "refusals", "supports_non_causal"]
)
def test_the_base_class_has_the_protocols_signatures(name):
    written = inspect.signature(getattr(BackendBase, name))
    asked = inspect.signature(getattr(Backend, name))
    assert written == asked


def test_forward_asks_for_a_scale_and_takes_nothing_but_keywords_after_metadata():
    parameters = inspect.signature(Backend.forward).parameters
    assert list(parameters)[:4] == ["self", "q", "kv_cache", "metadata"]
    keywords = [p for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert [p.name for p in keywords] == [
        "softmax_scale",
        "q_scale",
        "kv_scale",
        "out",
        "lse",
    ]
    assert parameters["softmax_scale"].default is inspect.Parameter.empty


def test_workspace_defaults_to_what_the_cost_says(plain_backend, make_step, cpu):
    problem = make_step().problem
    expected = plain_backend.cost(problem, cpu).workspace_bytes
    assert plain_backend.workspace_bytes(problem, cpu) == expected


def test_an_adapter_must_write_what_core_cannot_know():
    assert BackendBase.__abstractmethods__ == {
        "_forward",
        "builder_cls",
        "capability",
        "cost",
        "evidence",
        "supports_non_causal",
    }


def test_cost_and_options_are_plain_data():
    from mla_decode import CliOption, Cost

    assert get_type_hints(Cost)["kv_walks"] is int
    with pytest.raises(AttributeError):
        Cost(kv_walks=1, rows=1, launches=1, workspace_bytes=1).rows = 2
    option = CliOption(name="--x", help="h", default=None, apply=lambda d, _: d)
    assert option.apply("device", "value") == "device"


CONFIG = """
[mypy]
strict = true
[mypy-torch.*,numpy.*]
follow_imports = skip
"""


@pytest.mark.skipif(
    find_spec("mypy") is None, reason="mypy is not here: the types session runs this"
)
def test_a_type_checker_holds_a_backend_to_the_protocol(tmp_path):
    from mypy import api

    (tmp_path / "conforming.py").write_text(CONFORMING)
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    output, errors, status = api.run(
        [
            f"--config-file={tmp_path / 'mypy.ini'}",
            f"--cache-dir={tmp_path / 'cache'}",
            str(tmp_path / "conforming.py"),
            str(tmp_path / "wrong.py"),
        ]
    )
    assert not errors
    assert status == 1
    said = {"conforming": "", "wrong": ""}
    for line in output.splitlines():
        for name in said:
            said[name] += f"{line}\n" if f"{name}.py:" in line else ""
    assert "error" not in said["conforming"], output
    for words in ("capability.Capability", "backend.DecodeOutput"):
        assert words in said["conforming"]
    for words in (
        'expression has type "NoCost", variable has type "Backend"',
        'Return type "int" of "cost" incompatible',
        'Signature of "supports_non_causal" incompatible',
        'expression has type "WithMask", variable has type "Backend"',
    ):
        assert words in said["wrong"], output
