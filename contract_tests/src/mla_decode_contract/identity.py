"""Who was tested, by whom, on what: the identity that every report carries."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from importlib.metadata import Distribution, entry_points, version
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

import mla_decode.version
from mla_decode.discovery import ENTRY_POINT_GROUP
from mla_decode_contract.hook import NamesLibraries

if TYPE_CHECKING:
    from mla_decode.backend import Backend
    from mla_decode.device import DeviceInfo

KIT = "mla-decode-contract"
CORE = "mla-decode"


def kit_version() -> str:
    """The version of the kit that runs."""
    return version(KIT)


def machine(backend: Backend, device: DeviceInfo) -> dict[str, Any]:
    """What a worker runs on; called in the worker, where torch is loaded."""
    import torch  # noqa: PLC0415 - the host's process needs none of it

    libraries = dict(device.libraries)
    if isinstance(backend, NamesLibraries):
        libraries.update(backend.library_versions(device))
    return {
        "torch": str(torch.__version__),
        "driver": _driver() if torch.cuda.is_available() else None,
        "runtime": torch.version.cuda or torch.version.hip,
        "device_name": device.name or platform.processor() or platform.machine(),
        "libraries": libraries,
        "evidence_of_backend": backend.evidence(device),
    }


def software(backend_spec: str, backend: Backend) -> dict[str, Any]:
    """Versions of the contract, the kit, core and the adapter."""
    distribution = _distribution(backend_spec)
    return {
        "contract": {
            "core": mla_decode.version.CONTRACT_VERSION,
            "adapter": backend.contract,
        },
        "kit": {"name": KIT, "version": kit_version()},
        "core": {"name": CORE, "version": version(CORE)},
        "adapter": {
            "backend": backend.name,
            "distribution": distribution.name if distribution else None,
            "version": distribution.version if distribution else None,
            "commit": _commit(distribution) if distribution else None,
        },
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _distribution(backend_spec: str) -> Distribution | None:
    points = entry_points(group=ENTRY_POINT_GROUP, name=backend_spec)
    return next((point.dist for point in points if point.dist is not None), None)


def _commit(distribution: Distribution) -> str | None:
    """The commit that a distribution was installed from, where it can be known."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return None
    origin = json.loads(text)
    commit = origin.get("vcs_info", {}).get("commit_id")
    if commit is not None:
        return str(commit)
    git = shutil.which("git")
    if git is None or not origin.get("dir_info", {}).get("editable"):
        return None
    return _output(
        [git, "-C", unquote(urlparse(origin["url"]).path), "rev-parse", "HEAD"]
    )


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    return _output([tool, "--query-gpu=driver_version", "--format=csv,noheader"])


def _output(command: list[str]) -> str | None:
    done = subprocess.run(  # noqa: S603 - a fixed tool, found on the path
        command, capture_output=True, text=True, timeout=20, check=False
    )
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else None
