"""`mla-decode bench` on a CPU: real times, traces replayed, refusals as rows."""

import json
import sys

import pytest
import torch

from mla_decode import Candidate, DeviceInfo, MLADecoder, OutdatedLibraryError
from mla_decode.cli import app as cli_app
from mla_decode.cli.bench import command as command_module
from mla_decode.cli.bench import plot as plot_module
from mla_decode.cli.bench.measure import SOFTMAX_SCALE, flatten, make_step, measure
from mla_decode.cli.bench.plan import backends_of, default_grid
from mla_decode.cli.bench.points import Layout, Point, Row
from mla_decode.cli.bench.trace import Columns, Request, read_trace, replay
from mla_decode.errors import ArgumentError
from mla_decode.reference import ReferenceBackend

CPU = DeviceInfo.assume("cpu")
TINY = ("--num-heads", "2", "--batch", "1", "--seq-len", "32", "--repeats", "1")
TRACE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,20,3\n"
    "2023-11-16 18:15:46.7000000,40,6\n"
    "2023-11-16T18:20:00,10,1\n"
)


def run(capsys, monkeypatch, *arguments):
    """Run the command in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["mla-decode", "bench", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(command_module, "copy_bandwidth", lambda _device: 8.0)
    with pytest.raises(SystemExit) as stopped:
        cli_app.main()
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


class Named(ReferenceBackend):
    """The reference under another name and with another word of evidence."""

    def __init__(self, name, word="hardware"):
        self.name = name
        self.word = word

    def evidence(self, device):
        del device
        return self.word

    def __hash__(self):
        return id(self)


class Outdated(ReferenceBackend):
    name = "outdated"

    def refusals(self, problem, device):
        found = super().refusals(problem, device)
        return (
            found if problem.max_query_len == 1 else [*found, *_mask_refusals(device)]
        )

    def supports_non_causal(self, device):
        del device
        raise OutdatedLibraryError(
            "causal only.", library="lib", installed="1", first_supported="2"
        )


class BlocksOnly(ReferenceBackend):
    """Refuses the flatten: its batch has too many requests."""

    name = "blocks"

    def refusals(self, problem, device):
        found = super().refusals(problem, device)
        if problem.max_num_reqs > 2:
            found += _mask_refusals(device)
        return found


def _mask_refusals(device):
    from mla_decode import DecodeProblem

    empty = type(ReferenceBackend.capability)(rows=())
    return empty.refusals(DecodeProblem(num_q_heads=1), device)


def candidates(*backends):
    return {b.name: Candidate(name=b.name, backend=b) for b in backends}


def a_point(**fields):
    defaults = {
        "num_heads": 2,
        "query_len": 3,
        "seq_lens": (40, 9),
        "causal": True,
        "layout": Layout(page_size=16),
    }
    return Point(**{**defaults, **fields})


# --- the command ----------------------------------------------------------------------


def test_the_default_grid_names_device_date_and_evidence(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, *TINY, "--device", "cpu")
    assert code == 0
    assert "cpu, 20" in out
    assert "reference: reference" in out
    assert out.count("reference causal") == 2
    assert "\x1b[" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_carries_every_figure(capsys, monkeypatch):
    code, out, _ = run(
        capsys, monkeypatch, *TINY, "--non-causal", "--json", "--query-len", "4"
    )
    answer = json.loads(out)
    (row,) = answer["rows"]
    assert (code, answer["copy_gb_s"], row["causal"]) == (0, 8.0, False)
    assert row["kv_gb_s"] == pytest.approx(32 * 576 * 2 / row["us"] / 1e3)
    assert row["speed_up_over_flatten"] == pytest.approx(row["flatten_us"] / row["us"])


def test_fp32_is_timed_by_the_reference(capsys, monkeypatch):
    words = ("--dtype", "fp32", "--kv-dtype", "fp32", "--query-len", "1", "--json")
    code, out, _ = run(capsys, monkeypatch, *TINY, *words)
    (row,) = json.loads(out)["rows"]
    assert (code, row["dtype"], row["kv_dtype"]) == (0, "fp32", "fp32")
    assert row["kv_gb_s"] == pytest.approx(32 * 576 * 4 / row["us"] / 1e3)


@pytest.mark.parametrize("drafts", [(), ("--non-causal",)], ids=["verify", "draft"])
def test_a_trace_is_replayed(capsys, monkeypatch, tmp_path, drafts):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    arguments = (*TINY, "--query-len", "2", "--trace", str(path), "--json", *drafts)
    code, out, _ = run(capsys, monkeypatch, *arguments, "--trace-steps", "2")
    rows = json.loads(out)["rows"]
    assert code == 0
    origins = [row["origin"] for row in rows]
    assert origins == (["draft", "verify"] * 2 if drafts else ["verify"] * 2)
    code, out, _ = run(capsys, monkeypatch, *arguments, "--trace-steps", "99")
    assert len(json.loads(out)["rows"]) == 7 * (1 + len(drafts))
    plain = [argument for argument in arguments if argument != "--json"]
    _, out, _ = run(capsys, monkeypatch, *plain, "--trace-steps", "1")
    assert "reference verify" in out
    assert ("reference draft" in out) == bool(drafts)


def test_where_everything_is_refused_the_exit_code_says_so(capsys, monkeypatch):
    known = candidates(BlocksOnly())
    monkeypatch.setattr(command_module, "discover", lambda: known)
    code, out, _ = run(
        capsys, monkeypatch, *TINY[:2], *TINY[4:], "--batch", "3", "--backend", "blocks"
    )
    words = " ".join(out.split())
    assert code == 1
    assert "refused arch" in words
    assert words.count("refused blocks") == 1
    assert "arch: No kernels for this architecture" in words
    assert "got cpu; allowed: none" in words
    assert "fix: use reference" in words


def test_json_carries_every_reason_of_a_refusal(capsys, monkeypatch):
    known = candidates(BlocksOnly())
    monkeypatch.setattr(command_module, "discover", lambda: known)
    code, out, _ = run(
        *(capsys, monkeypatch, *TINY[:2], *TINY[4:], "--batch", "3"),
        *("--query-len", "2", "--backend", "blocks", "--json"),
    )
    (row,) = json.loads(out)["rows"]
    (reason,) = row["refusals"]
    assert (code, row["refused"]) == (1, ["arch"])
    assert set(reason) == {"code", "message", "got", "allowed", "fix"}
    assert reason["got"] == "cpu"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--backend", "nobody"), "nobody"),
        (("--device", "tpu"), "tpu"),
        (("--query-len", "64"), "hold a block"),
        (("--trace", "no-such-file.csv"), "cannot be read"),
        (("--trace", "x", "--trace-columns", "a,b"), "three columns"),
    ],
)
def test_usage_errors_exit_with_four(capsys, monkeypatch, arguments, words):
    code, _, err = run(capsys, monkeypatch, *TINY, *arguments)
    assert code == 4
    assert words in err


def test_a_picture_is_drawn(capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    code, _, _ = run(capsys, monkeypatch, *TINY, "--plot", str(path))
    assert code == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent/figure.png", "directory that exists"),
        (".", "cannot be written there"),
        ("figure.xyz", "no format"),
    ],
)
def test_a_picture_that_could_not_be_written_is_said_before_anything_is_timed(
    capsys, monkeypatch, tmp_path, name, words
):
    pytest.importorskip("matplotlib")
    code, out, err = run(capsys, monkeypatch, *TINY, "--plot", str(tmp_path / name))
    assert (code, out) == (4, "")
    assert words in err


def test_a_missing_matplotlib_is_said_before_anything_is_timed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run(capsys, monkeypatch, *TINY, "--plot", "x.png")
    assert (code, out) == (4, "")
    assert "mla-decode[plot]" in err


def test_the_help_names_the_extra_that_draws(capsys, monkeypatch):
    code, out, _ = run(capsys, monkeypatch, "--help")
    assert code == 0
    assert "mla-decode[plot]" in out


# --- the picture ----------------------------------------------------------------------


def test_the_picture_leaves_refused_rows_out(tmp_path):
    figure_cls = pytest.importorskip("matplotlib.figure").Figure
    kept = []

    class Kept(figure_cls):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            kept.append(self)

    rows = [
        Row(backend="a", evidence="e", point=a_point(seq_lens=(n,)), us=u, flatten_us=f)
        for n, u, f in ((64, 9.0, 18.0), (32, 5.0, 5.0), (16, None, None))
    ]
    trace = a_point(origin="draft", causal=False, query_len=1)
    rows.append(Row(backend="a", evidence="e", point=trace, us=4.0))
    path = tmp_path / "f.svg"
    plot_module.draw(Kept, rows, path, title="t", bandwidth=1.0)
    times, heat, gains = kept[0].axes[:3]
    drawn = {line.get_label(): list(line.get_xdata()) for line in times.lines}
    assert drawn == {"a H2 Q3 causal B1": [32, 64], "a draft": [24]}
    assert list(gains.lines[0].get_ydata()) == [1.0, 2.0]
    assert len(heat.get_yticks()) == 2
    plot_module.draw(Kept, [], path, title="none", bandwidth=1.0)
    assert kept[1].axes[0].get_legend() is None
    many = [
        Row(backend=str(i), evidence="e", point=a_point(), us=1.0) for i in range(41)
    ]
    plot_module.draw(Kept, many, path, title="many", bandwidth=1.0)
    assert len(kept[2].axes[1].get_yticks()) == 40


# --- measuring ------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
def test_the_flatten_computes_the_same(causal):
    step = make_step(a_point(causal=causal), CPU)
    outs = []
    for one in (step, flatten(step)):
        decoder = MLADecoder(one.problem, "reference", device="cpu")
        plan = decoder.plan(one.common)
        outs.append(decoder.run(one.q, one.kv, plan, softmax_scale=SOFTMAX_SCALE).out)
    torch.testing.assert_close(outs[0], outs[1], atol=2e-2, rtol=2e-2)


def test_fp8_gets_its_scales():
    fp8 = Layout(dtype="fp8", kv_dtype="fp8", page_size=16)
    step = make_step(a_point(layout=fp8), CPU)
    assert sorted(step.scales) == ["kv_scale", "q_scale"]
    assert step.problem.out_dtype == "bf16"


@pytest.mark.parametrize(
    ("backend", "fields", "refused", "has_flatten"),
    [
        (ReferenceBackend(), {"query_len": 1}, False, False),
        (ReferenceBackend(), {}, False, True),
        (BlocksOnly(), {}, False, False),
        (BlocksOnly(), {"seq_lens": (9,) * 3}, True, False),
        (Outdated(), {"causal": False}, True, False),
    ],
    ids=["token", "block", "no-flatten", "refused", "outdated"],
)
def test_a_refusal_is_a_row(backend, fields, refused, has_flatten):
    row = measure(
        a_point(**fields),
        backend.name,
        CPU,
        candidates=candidates(backend),
        lowering="refuse",
        repeats=1,
    )
    assert (row.us is None) == refused == bool(row.refused)
    assert (row.kv_gb_s is None) == refused
    assert (row.speed_up is not None) == has_flatten


def test_a_backend_that_is_not_installed_is_a_row_too():
    from mla_decode import discover

    absent = {"gone": discover([])["triton_mla"]}
    row = measure(
        a_point(), "gone", CPU, candidates=absent, lowering="refuse", repeats=1
    )
    assert (row.evidence, row.refused) == ("not installed", ("dependency",))


def test_a_copy_has_a_bandwidth():
    from mla_decode.cli.bench.measure import copy_bandwidth

    assert copy_bandwidth(CPU) > 0


# --- who is timed ---------------------------------------------------------------------


def test_what_does_not_run_here_is_left_out_unless_named():
    known = candidates(
        ReferenceBackend(),
        Named("third"),
        Named("sim", "simulated"),
        Named("rocm_aiter"),
    )
    known["absent"] = Candidate(name="absent")
    assert backends_of(CPU, known, []) == ["reference", "third"]
    assert backends_of(CPU, known, ["sim"]) == ["sim"]
    gfx = DeviceInfo(vendor="rocm", arch="gfx1100")
    with pytest.raises(ArgumentError, match="doctor"):
        backends_of(gfx, {"absent": Candidate(name="absent")}, [])


def test_a_gpu_gets_a_larger_grid():
    gpu = DeviceInfo(vendor="cuda", arch="sm_90")
    assert max(default_grid(gpu, None, None, None, None).seq_lens) == 16384
    assert default_grid(CPU, [3], [5], [7], [9]).batches == (7,)


def test_a_backend_without_kernels_for_the_arch_is_left_out():
    bare = Named("third")
    bare.capability = type(ReferenceBackend.capability)(rows=())
    known = candidates(ReferenceBackend(), bare)
    assert backends_of(CPU, known, []) == ["reference"]


# --- traces ---------------------------------------------------------------------------


def test_a_trace_is_read_in_order_of_arrival(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("t,c,g\n2.5,1,2\n1,3,4\n")
    found = read_trace(path, Columns(timestamp="t", context="c", generated="g"))
    assert [(r.arrival_s, r.context) for r in found] == [(1.0, 3), (2.5, 1)]
    path.write_text(TRACE)
    first, second, third = (r.arrival_s for r in read_trace(path, Columns()))
    assert second - first == pytest.approx(0.01941, abs=1e-6)
    assert third - first == pytest.approx(253.31941, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "lacks a column"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "lacks a column"),
        (TRACE.splitlines()[0], "no request"),
        (TRACE + "soon,1,1\n", "line 5"),
        (TRACE + "1,-1,1\n", "-1 tokens"),
        (TRACE + "1,1\n", "line 5"),
        (TRACE + "nan,1,1\n", "no time"),
        (TRACE + "1,\udcff,1\n", "is no CSV"),
    ],
    ids=["empty", "column", "none", "time", "negative", "short", "nan", "bytes"],
)
def test_what_is_no_trace_is_refused(tmp_path, text, words):
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(ArgumentError, match=words):
        read_trace(path, Columns())


def test_requests_come_wait_and_go():
    requests = tuple(
        Request(arrival_s=at, context=c, generated=g)
        for at, c, g in ((0.0, 10, 4), (0.0, 20, 2), (0.0, 30, 2), (9.0, 40, 1))
    )
    steps = list(replay(requests, max_batch=2, query_len=4, accepted=2.0, step_s=1.0))
    assert steps == [(14, 24), (16, 34), (44,)]
