"""Packages under the names of kernel libraries, laid on the disk of a test."""

import importlib

from mla_decode_rocm_aiter.profiles import find_profile
from mla_decode_rocm_aiter.tables import packaged_tables

RELEASE = "0.1.20.post1"
MLA = "def mla_decode_fwd(q, kv_buffer, o, causal=True): ...\n"
PLANNERS = """
def get_mla_metadata_info_v1(*sizes, is_sparse, fast_mode=True): ...
def get_mla_metadata_v1(
    *tensors, page_size=1, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1,
    fast_mode=True, {dtypes},
): ...
"""
COLUMNS = "qType,kvType,Gqa,ps,qSeqLen,prefill,causal,lse,cprr,knl_name,co_name"


def kernel_table(release, arch="gfx950"):
    """The kernel table of a release in the columns that AITER ships."""
    lines = [COLUMNS]
    for row in packaged_tables()[arch, find_profile(release).tables[arch]].rows:
        name = f"_ZN5aiter{len(row.kernel)}{row.kernel}E,{row.kernel}.co"
        numbers = (row.gqa, row.persistent, row.qseqlen, False, row.causal, row.lse)
        flags = ",".join(str(int(n)) for n in (*numbers, row.round_robin))
        lines.append(f"{row.q_dtype},{row.kv_dtype},{flags},{name}")
    return "\n".join(lines) + "\n"


def write_package(site, monkeypatch, name, files, *, distribution=None):
    """Write a package that Python finds first, and a distribution's metadata."""
    package = site / name
    package.mkdir(parents=True, exist_ok=True)
    for file, source in files.items():
        (package / file).write_text(source, encoding="utf-8")
    if distribution is not None:
        title, version = distribution
        info = site / f"{title.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n"
        )
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
    return package


def write_aiter(
    site,
    monkeypatch,
    *,
    init=PLANNERS,
    mla=MLA,
    dtypes="dtype_q=None, dtype_kv=None",
    release=RELEASE,
):
    """Write AMD's AITER as far as a reader of files and signatures sees it."""
    (site / "csrc").mkdir(parents=True)
    table = site / "hsa" / "gfx950" / "mla"
    table.mkdir(parents=True)
    (table / "mla_asm.csv").write_text(kernel_table(release))
    return write_package(
        site,
        monkeypatch,
        "aiter",
        {"__init__.py": init.replace("{dtypes}", dtypes), "mla.py": mla},
        distribution=("amd-aiter", release),
    )
