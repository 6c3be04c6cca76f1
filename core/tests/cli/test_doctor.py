"""`mla-decode doctor`: each wrong state named apart, in a process of its own."""

import json
import os
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from mla_decode import (
    Candidate,
    DeviceInfo,
    OutdatedLibraryError,
    Refusal,
    RefusalCode,
)
from mla_decode.cli import app as cli_app
from mla_decode.cli import doctor as doctor_module
from mla_decode.cli import entry
from mla_decode.diagnosis import Finding, Level, Section
from mla_decode.diagnosis import asking as asking_module
from mla_decode.diagnosis import backends as backends_module
from mla_decode.diagnosis import children as children_module
from mla_decode.diagnosis import doctor as diagnosis_module
from mla_decode.diagnosis import torch_build as torch_module
from mla_decode.diagnosis.children import MARK, ChildAnswer, ask_child
from mla_decode.diagnosis.machine import Machine, look_at_machine
from mla_decode.diagnosis.places import owners_of, places_of, standing_findings
from mla_decode.diagnosis.symptoms import symptom_of
from mla_decode.diagnosis.torch_build import (
    TorchBuild,
    ask_torch,
    torch_findings,
    triton_finding,
    wrong_torch,
)
from mla_decode.reference import ReferenceBackend

CPU = DeviceInfo.assume("cpu")
AMD = Machine(vendor="rocm", arch="gfx942", source="/sys/x")
NVIDIA = Machine(vendor="cuda", source="/proc/x")
KERNELS = ("triton", "aiter", "flash_mla", "vllm", "torch")


def run(capsys, monkeypatch, main, *arguments):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["mla-decode", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stopped:
        main()
    printed = capsys.readouterr()
    return stopped.value.code or 0, printed.out, printed.err


def worst(findings):
    order = list(Level)
    return max((finding.level for finding in findings), key=order.index)


# --- the whole, as a user runs it ---------------------------------------------------


def test_a_fresh_process_finds_this_machine_and_imports_no_kernel_library(tmp_path):
    code = (
        "import sys; sys.argv = ['mla-decode', 'doctor', '--json']\n"
        "from mla_decode.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["healthy"] else 1)
    about = {s["about"]: s["findings"] for s in found["sections"]}
    version = metadata.version("mla-decode")
    assert about["mla-decode"][0]["what"] == f"mla-decode {version}"
    assert metadata.version("torch") in about["torch"][0]["what"]
    assert any("loads and serves" in f["what"] for f in about["reference"])
    assert {"torch", "device", "rocm_aiter", "served by"} <= set(about)
    roots = {name.split(".")[0] for name in done.stderr.split()}
    assert "mla_decode" in roots
    assert not set(KERNELS) & roots


def test_a_torch_that_does_not_import_is_named_and_the_doctor_lives(tmp_path):
    (tmp_path / "torch.py").write_text(
        "raise ImportError('x.so: undefined symbol: _Z')"
    )
    done = subprocess.run(
        [sys.executable, "-c", "from mla_decode.cli import main; main()", "doctor"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    assert "torch cannot be imported: ABI mismatch" in text
    assert "\x1b[" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


FAKE_TORCH = """
import types
__version__ = "2.13.0+cu130"
version = types.SimpleNamespace(cuda="13.0", hip=None)
cuda = types.SimpleNamespace(is_available=lambda: False)
"""


def test_a_cuda_build_of_torch_in_an_image_for_amd_is_told(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAKE_TORCH)
    code = (
        "import sys; sys.argv = 'x doctor --arch gfx942 --json'.split()\n"
        "from mla_decode.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    (about,) = (
        section["findings"]
        for section in json.loads(done.stdout)["sections"]
        if section["about"] == "torch"
    )
    assert about[0]["what"] == "torch is a CUDA build on an AMD host"
    assert "2.13.0+cu130" in about[0]["got"]


SECTION = Section(
    about="torch",
    findings=(
        Finding(level=Level.OK, what="well"),
        Finding(level=Level.WARN, what="[odd]", got="this", fix="do that"),
    ),
)
SICK = Section(about="x", findings=(Finding(level=Level.ERROR, what="bad"),))


@pytest.mark.parametrize("main", [entry.main, cli_app.main], ids=["alone", "app"])
def test_only_an_error_fails_and_the_table_says_all(capsys, monkeypatch, main):
    found = diagnosis_module.Diagnosis(device=CPU, sections=(SECTION,))
    monkeypatch.setattr(doctor_module, "diagnose", lambda _arch, _timeout: found)
    code, out, _ = run(capsys, monkeypatch, main, "doctor")
    assert code == 0
    assert "[odd]" in out
    assert "fix: do that" in out
    assert out.rstrip().endswith("healthy")
    found = diagnosis_module.Diagnosis(device=CPU, sections=(SECTION, SICK))
    code, out, _ = run(capsys, monkeypatch, main, "doctor")
    assert code == 1
    assert "something is wrong" in out
    code, out, _ = run(capsys, monkeypatch, main, "doctor", "--json")
    assert (code, json.loads(out)["healthy"]) == (1, False)


def test_usage_errors_exit_with_four(capsys, monkeypatch):
    code, _, err = run(capsys, monkeypatch, entry.main, "doctor", "--arch", "sm90")
    assert code == 4
    assert "sm_90" in err
    assert run(capsys, monkeypatch, entry.main, "doctor", "--none")[0] == 4
    assert run(capsys, monkeypatch, entry.main, "nothing")[0] == 4


def test_a_named_arch_is_judged_and_not_simulated(monkeypatch):
    asked = []

    def sections(device, _timeout, *, elsewhere):
        asked.append((device, elsewhere))
        return (SECTION,)

    monkeypatch.setattr(diagnosis_module, "backend_sections", sections)
    build = TorchBuild(
        version="2", hip="7", arch="gfx950", name="MI", archs=("gfx950",)
    )
    monkeypatch.setattr(diagnosis_module, "ask_torch", lambda _timeout: build)
    monkeypatch.setattr(diagnosis_module, "look_at_machine", lambda: AMD)
    diagnosis_module.diagnose("gfx942")
    diagnosis_module.diagnose()
    assert [(d.arch, d.assumed, elsewhere) for d, elsewhere in asked] == [
        ("gfx942", False, True),
        ("gfx950", False, False),
    ]
    assert asked[1][0].name == "MI"


# --- torch and triton ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "machine", "level", "words"),
    [
        ({"cuda": "13"}, AMD, Level.ERROR, "CUDA build on an AMD host"),
        ({}, NVIDIA, Level.ERROR, "CPU build on an NVIDIA host"),
        ({"cuda": "13"}, NVIDIA, Level.ERROR, "sees no GPU"),
        ({"cuda": "13"}, Machine(vendor="cpu"), Level.OK, "torch 2.13"),
        (
            {"cuda": "13", "arch": "sm_90", "archs": ("sm_80", "compute_90")},
            NVIDIA,
            Level.OK,
            "torch 2.13",
        ),
        (
            {"cuda": "13", "arch": "sm_70", "archs": ("sm_90",)},
            NVIDIA,
            Level.ERROR,
            "no kernels for sm_70",
        ),
        (
            {"hip": "7", "arch": "gfx942", "archs": ("gfx942:sramecc+",)},
            AMD,
            Level.OK,
            "torch 2.13",
        ),
    ],
    ids=["cuda-on-amd", "cpu", "blind", "no-gpu", "fits", "too-old-a-card", "rocm"],
)
def test_the_wrong_torch_build_is_told(build, machine, level, words):
    found = torch_findings(TorchBuild(version="2.13", **build), machine)
    assert worst(found) is level
    assert words in " ".join(finding.what for finding in found)
    assert all(f.fix for f in found if f.level is Level.ERROR)


def test_a_fitting_build_need_not_see_the_gpu_of_a_machine_that_was_named():
    build = TorchBuild(version="2.13", cuda="13", where="/t")
    built, blind = torch_findings(build, NVIDIA, elsewhere=True)
    assert (built.level, built.got) == (Level.OK, "/t")
    assert (blind.level, blind.fix) == (Level.WARN, "")
    assert "sees no GPU" in blind.what
    (wrong,) = torch_findings(build, AMD, elsewhere=True)
    assert wrong.level is Level.ERROR


def test_a_torch_that_fails_in_an_unknown_way_keeps_its_words(monkeypatch):
    dead = ChildAnswer(said=(), trouble="ValueError: odd")
    monkeypatch.setattr(torch_module, "ask_child", lambda *_a, **_k: dead)
    found = ask_torch()
    assert (found.what, found.got) == ("torch cannot be imported", "ValueError: odd")


@pytest.mark.parametrize(
    ("versions", "wants", "level", "words"),
    [
        ({}, [], Level.OK, "not installed"),
        ({"triton": "3.9.0"}, None, Level.OK, "triton 3.9.0"),
        ({"triton": "3.9.0"}, ["triton==3.9.0", "numpy"], Level.OK, "triton 3.9.0"),
        ({"triton": "3.8.0"}, ["triton==3.9.0"], Level.ERROR, "not the one"),
        (
            {"triton": "3.8.0"},
            ["triton==3.9.0; python_version < '3'"],
            Level.OK,
            "triton 3.8.0",
        ),
    ],
)
def test_triton_is_held_to_what_torch_asks_for(
    monkeypatch, versions, wants, level, words
):
    def find(table, name):
        if table.get(name) is None:
            raise metadata.PackageNotFoundError(name)
        return table[name]

    monkeypatch.setattr(metadata, "version", lambda name: find(versions, name))
    monkeypatch.setattr(metadata, "requires", lambda name: find({"torch": wants}, name))
    found = triton_finding()
    assert found.level is level
    assert words in found.what


@pytest.mark.parametrize(
    ("cuda", "hip", "words"),
    [("13", None, None), (None, "7", "ROCm build"), (None, None, "CPU build")],
)
def test_a_library_is_held_to_the_torch_that_it_needs(monkeypatch, cuda, hip, words):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = wrong_torch("Lib", "cuda", Level.WARN)
    if words is None:
        assert found is None
    else:
        assert found.level is Level.WARN
        assert found.what.startswith("Lib needs a CUDA build of torch")
        assert words in found.what


# --- where a name leads -------------------------------------------------------------


def write_module(folder, name="some_library", *, init=True):
    (folder / name).mkdir(parents=True)
    if init:
        (folder / name / "__init__.py").write_text("raise SystemExit")
    return folder / name


def test_a_name_that_leads_nowhere_or_to_one_place_is_in_order(tmp_path, monkeypatch):
    assert places_of("some_library") == ()
    assert list(standing_findings("some_library", Level.ERROR)) == []
    one = write_module(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert places_of("some_library") == (one.resolve(),)
    assert list(standing_findings("some_library", Level.ERROR)) == []
    assert owners_of("some_library") == ()


def test_what_hides_a_library_is_named_first(tmp_path, monkeypatch):
    site, here = tmp_path / "site", tmp_path / "here"
    hidden = write_module(site)
    here.mkdir()
    (here / "some_library.py").write_text("")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(here), *sys.path])
    (finding,) = standing_findings("some_library", Level.ERROR)
    assert finding.got == f"{here / 'some_library.py'} before {hidden}"
    assert finding.level is Level.ERROR


def test_a_bare_folder_counts_only_where_nothing_better_lies(tmp_path, monkeypatch):
    bare = write_module(tmp_path / "a", init=False)
    monkeypatch.syspath_prepend(str(tmp_path / "a"))
    assert places_of("some_library") == (bare.resolve(),)
    better = write_module(tmp_path / "b")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "b")])
    assert places_of("some_library") == (better.resolve(),)


def test_two_distributions_in_one_folder_are_told(tmp_path, monkeypatch):
    write_module(tmp_path)
    for name in ("first", "second"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        (info / "top_level.txt").write_text("some_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = standing_findings("some_library", Level.WARN)
    assert finding.got == "first 1.0, second 1.0"


# --- the machine --------------------------------------------------------------------


def test_the_drivers_files_name_vendor_and_arch(tmp_path):
    assert look_at_machine(tmp_path).vendor == "cpu"
    nodes = tmp_path / "sys/class/kfd/kfd/topology/nodes"
    for number, version in enumerate((0, 90402)):
        (nodes / str(number)).mkdir(parents=True)
        text = f"cpu_cores_count 0\ngfx_target_version {version}\nodd\n"
        (nodes / str(number) / "properties").write_text(text)
    (nodes / "2" / "properties").mkdir(parents=True)
    assert look_at_machine(tmp_path).arch == "gfx942"
    (nodes / "1" / "properties").unlink()
    assert look_at_machine(tmp_path).vendor == "cpu"
    proc = tmp_path / "proc/driver/nvidia"
    proc.mkdir(parents=True)
    (proc / "version").write_text("NVRM")
    assert look_at_machine(tmp_path).vendor == "cuda"


# --- children -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("", ""),
        ("raise SystemExit(3)", "exit code 3"),
        ("raise ValueError('x')", "ValueError: x"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    ],
)
def test_how_a_child_ends_takes_nothing_back(code, trouble):
    start = f"print('noise'); print('{MARK}{{\"a\": 1}}', flush=True)\n"
    answer = ask_child(start + code)
    assert answer == ChildAnswer(said=({"a": 1},), trouble=trouble)


def test_a_late_child_may_give_back_its_lock(tmp_path, monkeypatch):
    lock = tmp_path / "lock"
    code = (
        "import sys, time, pathlib\nlock = pathlib.Path(sys.argv[1])\nlock.touch()\n"
        "try:\n    time.sleep(60)\nfinally:\n    lock.unlink()\n"
    )
    answer = ask_child(code, str(lock), timeout_s=1.5)
    assert answer.trouble == "no answer within 1.5 s"
    assert not lock.exists()
    monkeypatch.setattr(children_module, "GRACE_S", 0.2)
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(60)"
    assert "no answer" in ask_child(deaf, timeout_s=1.5).trouble


# --- backends -----------------------------------------------------------------------


class Hooked(ReferenceBackend):
    """Diagnoses itself, and refuses with words that the hook said already."""

    name = "hooked"

    def diagnose(self, device):
        yield Finding(level=Level.WARN, what="library is old", got=device.arch)

    def refusals(self, problem, device):
        del problem, device
        return [
            Refusal(code=RefusalCode.IMPORT, message=m, got="g", allowed="a", fix="f")
            for m in ("library is old", "second reason")
        ]

    def supports_non_causal(self, device):
        del device
        raise OutdatedLibraryError(
            "causal only.", library="lib", installed="1", first_supported="2"
        )


class Broken(ReferenceBackend):
    """Every question about it raises."""

    name = "broken"

    def diagnose(self, device):
        raise RuntimeError(device.arch)

    def supports_non_causal(self, device):
        raise RuntimeError(device.arch)

    def library_versions(self, device):
        raise RuntimeError(device.arch)


class Versioned(ReferenceBackend):
    name = "versioned"

    def library_versions(self, device):
        del device
        return {"lib": "1.2"}


def refusal(code):
    return Refusal(code=code, message="gone", got="g", allowed="a", fix="f")


class Absent(ReferenceBackend):
    """Its GPU is not here, and perhaps more is wrong."""

    name = "absent"
    reasons = (refusal(RefusalCode.DEVICE_ABSENT),)

    def refusals(self, problem, device):
        del problem, device
        return list(self.reasons)


def answers(
    capsys, monkeypatch, candidates, device=CPU, skipped=(), *, elsewhere=False
):
    known = {candidate.name: candidate for candidate in candidates}
    monkeypatch.setattr(asking_module, "discover", lambda: known)
    asking_module.answer(device, skipped, elsewhere=elsewhere)
    said = [
        json.loads(line[len(MARK) :])
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(MARK)
    ]
    assert said[-1] == {"name": "", "findings": []}
    serving = [s["serving"] for s in said if "serving" in s]
    findings = [
        (s["name"], fields["level"], fields["what"])
        for s in said
        for fields in s.get("findings", ())
    ]
    return serving, findings


def test_an_outdated_library_is_said_and_nothing_is_said_twice(capsys, monkeypatch):
    hooked = Candidate(name="hooked", backend=Hooked())
    serving, findings = answers(capsys, monkeypatch, [hooked])
    assert serving == []
    assert [(level, what) for _, level, what in findings[1:]] == [
        ("warn", "library is old"),
        ("error", "lib is outdated: causal only."),
        ("error", "second reason"),
    ]


def test_a_gpu_that_is_absent_is_no_error_where_its_arch_was_named(capsys, monkeypatch):
    absent = [Candidate(name="absent", backend=Absent())]
    serving, findings = answers(capsys, monkeypatch, absent)
    assert (serving, findings[-1]) == ([], ("absent", "error", "gone"))
    serving, findings = answers(capsys, monkeypatch, absent, elsewhere=True)
    assert serving == ["absent"]
    assert [level for _, level, _ in findings] == ["ok", "warn", "ok"]
    assert findings[-1][2] == "loads and would serve cpu: reference"
    more = (*Absent.reasons, refusal(RefusalCode.DEPENDENCY))
    monkeypatch.setattr(Absent, "reasons", more)
    serving, findings = answers(capsys, monkeypatch, absent, elsewhere=True)
    assert serving == []
    assert [level for _, level, _ in findings] == ["ok", "warn", "error"]


def test_the_reference_serves_a_gpu_by_its_name_alone(capsys, monkeypatch):
    reference = [Candidate(name="reference", backend=ReferenceBackend())]
    assert answers(capsys, monkeypatch, reference)[0] == ["reference"]
    gfx = DeviceInfo.assume("gfx942")
    serving, findings = answers(capsys, monkeypatch, reference, device=gfx)
    assert serving == []
    assert findings[-1][1:] == (
        "ok",
        "loads and serves gfx942: reference; only where it is asked for by name",
    )


def test_a_backend_that_raises_is_its_own_finding(capsys, monkeypatch):
    broken = Candidate(name="broken", backend=Broken())
    serving, findings = answers(capsys, monkeypatch, [broken])
    assert serving == ["broken"]
    assert sum(level == "error" for _, level, _ in findings) == 3


def test_versions_are_said_and_skipped_ones_are_not_asked(capsys, monkeypatch):
    both = [
        Candidate(name="broken", backend=Broken()),
        Candidate(name="versioned", backend=Versioned()),
    ]
    serving, findings = answers(capsys, monkeypatch, both, skipped=["broken"])
    assert serving == ["versioned"]
    assert ("versioned", "ok", "library lib 1.2") in findings
    assert "of no installed distribution" in findings[0][2]
    gfx = DeviceInfo(vendor="rocm", arch="gfx1100")
    monkeypatch.setattr(
        Versioned, "capability", type(Versioned.capability)(rows=()), raising=True
    )
    serving, findings = answers(capsys, monkeypatch, both[1:], device=gfx)
    assert serving == []
    assert findings[-1][2] == "does not serve gfx1100"


def test_what_is_absent_weighs_as_much_as_it_is_needed(capsys, monkeypatch):
    absent = [
        Candidate(name="rocm_aiter", refusal=refusal(RefusalCode.DEPENDENCY)),
        Candidate(name="other", refusal=refusal(RefusalCode.DEPENDENCY)),
        Candidate(name="torn", refusal=refusal(RefusalCode.IMPORT)),
    ]
    gfx = DeviceInfo(vendor="rocm", arch="gfx942")
    _, findings = answers(capsys, monkeypatch, absent, device=gfx)
    levels = {name: level for name, level, _ in findings}
    assert levels == {"rocm_aiter": "warn", "other": "ok", "torn": "error"}
    with pytest.raises(LookupError, match="nothing"):
        answers(capsys, monkeypatch, [Candidate(name="nothing")])


def test_a_death_is_a_finding_and_the_rest_is_asked_again(monkeypatch):
    finding = Finding(
        level=Level.ERROR, what="import failed", got="undefined symbol: _Z"
    ).as_dict()
    said = [
        (
            {"name": "a", "findings": []},
            {"serving": "a"},
            {"name": "b", "findings": [finding]},
        ),
        ({"name": "", "findings": []},),
    ]
    asked = []

    def child(_code, _device, *skipped, timeout_s):
        del timeout_s
        asked.append(skipped)
        last = len(asked) == 2
        trouble = "" if last else "killed by SIGSEGV"
        return ChildAnswer(said=said[len(asked) - 1], trouble=trouble)

    monkeypatch.setattr(backends_module, "ask_child", child)
    found = {s.about: s.findings for s in backends_module.backend_sections(CPU)}
    assert asked == [(), ("a", "b")]
    assert "ABI mismatch" in found["b"][0].what
    assert found["b"][1].got == "killed by SIGSEGV"
    assert found["served by"][0].level is Level.OK


def test_a_child_that_says_nothing_ends_the_asking(monkeypatch):
    dead = ChildAnswer(said=(), trouble="exit code 1")
    monkeypatch.setattr(backends_module, "ask_child", lambda *_a, **_k: dead)
    sections = backends_module.backend_sections(CPU)
    assert [s.about for s in sections] == ["backends", "served by"]
    assert sections[1].findings[0].level is Level.ERROR


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("x.so: undefined symbol: _ZN3c10", "another torch"),
        ("libc10_hip.so: cannot open shared object file", "wrong torch build"),
        ("libtorch_cuda.so: cannot open shared object file", "wrong torch build"),
        ("libc10.so: cannot open shared object file", "another torch"),
        ("/x/cuda.so: invalid ELF header", "another processor or system"),
        ("/x/cuda.so: wrong ELF class: ELFCLASS32", "another processor or system"),
        ("No module named 'flash_mla.cuda'", "for another Python"),
        ("No module named 'vllm._flashmla_C'", "for another Python"),
        ("version `GLIBCXX_3.4.31' not found", "C++ runtime"),
        ("libcudart.so.12: cannot open shared object file", "another CUDA or ROCm"),
        ("No module named 'aiter.jit.module_x'", "JIT build is in progress"),
    ],
)
def test_a_librarys_words_give_the_cause_away(text, cause):
    found = symptom_of(text)
    assert found is not None
    assert cause in found.cause
    kept = backends_module.with_symptom(
        Finding(level=Level.ERROR, what="w", got=text, fix="and more")
    )
    assert kept.fix == f"{found.fix}; and more"


def test_unknown_words_stay_as_they_are():
    finding = Finding(level=Level.ERROR, what="w", got="odd words", fix="f")
    assert backends_module.with_symptom(finding) is finding
    assert symptom_of("odd words") is None
