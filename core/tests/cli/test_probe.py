"""`mla-decode probe` hands over to the backend, and says who has none."""

import sys

import pytest

from mla_decode import Candidate
from mla_decode.cli import app as cli_app
from mla_decode.cli import probe as probe_module
from mla_decode.reference import ReferenceBackend


class Probing(ReferenceBackend):
    name = "probing"

    def probe(self, *, as_json, device):
        sys.stdout.write(f"{device.arch} {as_json}\n")
        return 1


def run(capsys, monkeypatch, *arguments):
    found = {
        "probing": Candidate(name="probing", backend=Probing()),
        "reference": Candidate(name="reference", backend=ReferenceBackend()),
    }
    monkeypatch.setattr(probe_module, "discover", lambda: found)
    monkeypatch.setattr(sys, "argv", ["mla-decode", "probe", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli_app.main()
    printed = capsys.readouterr()
    return stopped.value.code, printed.out, printed.err


def test_a_backend_probes_and_its_exit_code_is_kept(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "probing", "--arch", "gfx950", "--json")
    assert (code, out) == (1, "gfx950 True\n")


@pytest.mark.parametrize("name", ["reference", "nobody"])
def test_who_cannot_be_probed_is_a_usage_error(capsys, monkeypatch, name):
    code, out, err = run(capsys, monkeypatch, name)
    assert (code, out) == (4, "")
    assert "probing" in err
