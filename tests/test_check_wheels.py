"""The check of built wheels sees what is missing and what is astray."""

import importlib.util
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GOOD_WHEEL = (
    "pkg/__init__.py",
    "pkg/py.typed",
    "pkg/data/table.csv",
    "pkg-1.0.dist-info/METADATA",
    "pkg-1.0.dist-info/WHEEL",
    "pkg-1.0.dist-info/RECORD",
    "pkg-1.0.dist-info/licenses/LICENSE",
)
GOOD_SDIST = tuple(
    f"pkg-1.0/{name}"
    for name in (
        *("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"),
        *("src/pkg/__init__.py", "src/pkg/py.typed", "src/pkg/data/table.csv"),
    )
)


@pytest.fixture(scope="module")
def checker():
    path = ROOT / "tools" / "check_wheels.py"
    spec = importlib.util.spec_from_file_location("check_wheels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def check(checker, tmp_path, capsys):
    """Lay a source tree and built files; give the exit code and what was printed."""

    def run(wheel, sdist=GOOD_SDIST, *, scratch=()):
        source = tmp_path / "dist" / "src"
        for name in ("pkg/__init__.py", "pkg/py.typed", "pkg/data/table.csv", *scratch):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).touch()
        built = tmp_path / "built"
        built.mkdir()
        with zipfile.ZipFile(built / "pkg-1.0-py3-none-any.whl", "w") as archive:
            for name in wheel:
                archive.writestr(name, "")
        with tarfile.open(built / "pkg-1.0.tar.gz", "w:gz") as archive:
            for name in sdist:
                archive.addfile(tarfile.TarInfo(name))
        code = checker.main([str(built), str(tmp_path / "dist")])
        return code, capsys.readouterr().out

    return run


def test_accepts_a_complete_wheel(check):
    code, said = check(GOOD_WHEEL, scratch=("pkg/__pycache__/a.pyc",))
    assert (code, said) == (0, "1 wheels looked into, 0 faults\n")


@pytest.mark.parametrize(
    "missing",
    ["pkg/py.typed", "pkg/data/table.csv", "pkg-1.0.dist-info/licenses/LICENSE"],
)
def test_names_what_a_wheel_lacks(check, missing):
    code, said = check([name for name in GOOD_WHEEL if name != missing])
    assert code == 1
    assert "lacks" in said


@pytest.mark.parametrize(
    "stray",
    ["tests/test_a.py", "pkg/__pycache__/a.pyc", "pkg/notes.txt", "conftest.py"],
)
def test_names_what_strayed_into_a_wheel(check, stray):
    code, said = check([*GOOD_WHEEL, stray])
    assert code == 1
    assert f"holds a stray {stray}" in said


def test_names_what_strayed_into_a_source_archive(check):
    code, said = check(GOOD_WHEEL, [*GOOD_SDIST, "pkg-1.0/.train/log.txt"])
    assert code == 1
    assert "pkg-1.0.tar.gz: holds a stray .train/log.txt" in said


def test_names_a_distribution_that_was_not_built(checker, tmp_path, capsys):
    (tmp_path / "dist" / "src" / "pkg").mkdir(parents=True)
    (tmp_path / "dist" / "src" / "pkg" / "py.typed").touch()
    assert checker.main([str(tmp_path), str(tmp_path / "dist")]) == 1
    assert "no wheel" in capsys.readouterr().out


def test_checking_nothing_is_not_a_success(checker, tmp_path):
    assert checker.main([str(tmp_path)]) == 1
