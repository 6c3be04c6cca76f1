import csv
import importlib
import sys

import pytest
from aiter_install import install_aiter, table_csv

from mla_decode import Refusal, RefusalCode
from mla_decode_rocm_aiter import find_profile, known_releases
from mla_decode_rocm_aiter.installation import Installation, find_installation
from mla_decode_rocm_aiter.manifest import demangle, parse_manifest, read_manifest
from mla_decode_rocm_aiter.tables import packaged_tables


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("release", known_releases())
def test_reads_back_the_table_of_every_release(tmp_path, monkeypatch, release, arch):
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    install_aiter(tmp_path, monkeypatch, release)
    found = find_installation()
    assert isinstance(found, Installation)
    assert found.version == release
    table = read_manifest(found, arch)
    expected = packaged_tables()[arch, find_profile(release).tables[arch]]
    assert table.rows == expected.rows
    assert "aiter" not in sys.modules


def test_leaves_prefill_rows_out(tmp_path, monkeypatch):
    text = table_csv("0.1.20", "gfx942")
    text += "bf16,bf16,16,0,0,1,0,0,_ZN5aiter3pflE,pfl.co\n"
    install_aiter(tmp_path, monkeypatch, "0.1.20", tables={"gfx942": text})
    table = read_manifest(find_installation(), "gfx942")
    assert "pfl" not in {row.kernel for row in table.rows}


def test_an_old_table_without_an_lse_column_has_no_lse_kernels(tmp_path, monkeypatch):
    lines = list(csv.reader(table_csv("0.1.13", "gfx950").splitlines()))
    at = lines[0].index("lse")
    text = "\n".join(",".join(line[:at] + line[at + 1 :]) for line in lines) + "\n"
    install_aiter(tmp_path, monkeypatch, "0.1.11", tables={"gfx950": text})
    table = read_manifest(find_installation(), "gfx950")
    assert not any(row.lse for row in table.rows)


def test_a_table_with_unknown_columns_is_refused(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.30", tables={"gfx950": "q,kv,heads\n"})
    found = read_manifest(find_installation(), "gfx950")
    assert found.code is RefusalCode.VERSION
    assert "qType" in found.got


@pytest.mark.parametrize(
    "line",
    ["bf16,bf16", "bf16,bf16,x,1,4,0,0,1,0,k,k.co", '"', "x" * 200_000, "\udcff"],
    ids=["short", "no number", "open quote", "endless", "bytes"],
)
def test_a_line_that_is_no_kernel_is_refused(tmp_path, line):
    path = tmp_path / "mla_asm.csv"
    text = table_csv("0.1.20", "gfx942") + line + "\n"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    found = parse_manifest(path, "gfx942")
    assert found.code is RefusalCode.VERSION
    assert "cannot be read" in found.message
    assert str(path) in found.got


def test_a_missing_table_names_its_path(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.20", tables={})
    found = read_manifest(find_installation(), "gfx950")
    assert found.code is RefusalCode.ARCH
    assert "hsa/gfx950/mla/mla_asm.csv" in found.got


def test_wheels_keep_their_tables_in_aiter_meta(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.20", wheel=True)
    found = find_installation()
    assert found.meta == tmp_path / "aiter_meta"
    assert not isinstance(read_manifest(found, "gfx950"), Refusal)


def test_the_environment_may_move_the_tables(tmp_path, monkeypatch):
    install_aiter(tmp_path / "site", monkeypatch, "0.1.20", wheel=True)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "csrc").mkdir(parents=True)
    monkeypatch.setenv("AITER_META_DIR", str(elsewhere))
    assert find_installation().meta == elsewhere


def test_the_environment_is_ignored_where_it_names_no_source(tmp_path, monkeypatch):
    install_aiter(tmp_path / "site", monkeypatch, "0.1.20", wheel=True)
    monkeypatch.setenv("AITER_META_DIR", str(tmp_path / "nowhere"))
    assert find_installation().meta == tmp_path / "site"


def test_absent_names_the_distribution():
    found = find_installation()
    assert found.code is RefusalCode.DEPENDENCY
    assert "amd-aiter" in found.fix


def test_the_unrelated_package_is_not_amds(tmp_path, monkeypatch):
    package = tmp_path / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text("")
    info = tmp_path / "aiter-0.1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: aiter\nVersion: 0.1.2\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = find_installation()
    assert found.code is RefusalCode.DEPENDENCY
    assert found.got == "distribution aiter 0.1.2"
    assert "amd-aiter" in found.allowed


def test_a_shadowing_folder_is_named(tmp_path, monkeypatch):
    (tmp_path / "aiter").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = find_installation()
    assert found.code is RefusalCode.IMPORT
    assert str(tmp_path / "aiter") in found.fix


def test_a_shadowing_file_is_named(tmp_path, monkeypatch):
    (tmp_path / "aiter.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    found = find_installation()
    assert found.code is RefusalCode.DEPENDENCY
    assert "aiter.py" in found.fix


def test_a_source_tree_without_metadata_has_its_version_file(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.20", metadata=False)
    assert find_installation().version == "0.1.20"


def test_build_locks_are_found(tmp_path, monkeypatch):
    install_aiter(tmp_path, monkeypatch, "0.1.20")
    build = tmp_path / "aiter" / "jit" / "build"
    build.mkdir(parents=True)
    (build / "lock_module_mla_asm").write_text("")
    assert [lock.name for lock in find_installation().build_locks()] == [
        "lock_module_mla_asm"
    ]


def test_demangles_only_what_it_knows():
    assert demangle("_ZN5aiter3pflE") == "pfl"
    assert demangle("plain") == "plain"
