"""Lay an AITER of a release on the disk, as far as a reader of files can see it."""

import importlib

from mla_decode_rocm_aiter import find_profile
from mla_decode_rocm_aiter.tables import packaged_tables

PLANNERS = """
def get_mla_metadata_info_v1(*sizes, is_sparse, fast_mode=True): ...
def get_mla_metadata_v1(
    *tensors, page_size=1, kv_granularity=16, max_seqlen_qo=-1, uni_seqlen_qo=-1,
    fast_mode=True, dtype_q=None, dtype_kv=None,
): ...
"""
COLUMNS = "qType,kvType,Gqa,ps,qSeqLen,prefill,causal,lse,cprr,knl_name,co_name"


def table_csv(release, arch):
    """The kernel table of a release in the columns that AITER ships."""
    profile = find_profile(release) or find_profile("0.1.20.post1")
    rows = packaged_tables()[arch, profile.tables[arch]].rows
    with_cprr = arch == "gfx950"
    lines = [COLUMNS if with_cprr else COLUMNS.replace("cprr,", "")]
    for row in rows:
        name = f"_ZN5aiter{len(row.kernel)}{row.kernel}E,{row.kernel}.co"
        flags = f"{int(row.persistent)},{row.qseqlen},0,{row.causal},{int(row.lse)}"
        cprr = f",{int(row.round_robin)}" if with_cprr else ""
        lines.append(f"{row.q_dtype},{row.kv_dtype},{row.gqa},{flags}{cprr},{name}")
    return "\n".join(lines) + "\n"


def install_aiter(
    site,
    monkeypatch,
    release,
    *,
    tables=None,
    wheel=False,
    metadata=True,
    source=PLANNERS,
):
    """Write the package, its metadata and its kernel tables below `site`."""
    package = site / "aiter"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    (package / "mla.py").write_text("")
    (package / "_version.py").write_text(f"__version__ = '{release}'\n")
    if metadata:
        info = site / f"amd_aiter-{release.replace('-', '_')}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: amd-aiter\nVersion: {release}\n"
        )
    meta = site
    if wheel:
        (package / "install_mode").write_text("install")
        meta = site / "aiter_meta"
    (meta / "csrc").mkdir(parents=True)
    if tables is None:
        tables = {arch: table_csv(release, arch) for arch in ("gfx942", "gfx950")}
    for arch, text in tables.items():
        path = meta / "hsa" / arch / "mla" / "mla_asm.csv"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()
