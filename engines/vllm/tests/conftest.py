"""Engines as child processes, each scenario run once and shared by the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ENGINE = Path(__file__).parent / "engine"
PROMPTS = [
    [5, 17, 33, 2, 64, 9, 41, 3],
    [11, 12, 13, 11, 12, 13, 11, 12, 13, 11, 12],
]
PLUGIN = {
    "METADATA": "Metadata-Version: 2.1\nName: tiny-mla-draft\nVersion: 0\n",
    "entry_points.txt": "[vllm.general_plugins]\ntiny_mla_draft = drafter:register\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an engine's process left behind."""

    returncode: int
    log: str
    said: dict[str, Any]
    """Empty where the engine ended early."""

    def lines(self) -> list[str]:
        """The log's lines from the plugin."""
        return [line for line in self.log.splitlines() if "mla-decode: " in line]


class Engines:
    """Runs scenarios, one engine a process, and remembers the outcomes."""

    def __init__(self, folder: Path, notes: list[str]) -> None:
        self.notes = notes
        self.models = folder / "models"
        self.known: dict[str, Outcome] = {}
        self.path = folder / "plugin"
        info = self.path / "tiny_mla_draft-0.dist-info"
        info.mkdir(parents=True)
        for name, text in PLUGIN.items():
            (info / name).write_text(text, encoding="utf-8")
        subprocess.run(
            [sys.executable, str(ENGINE / "models.py"), str(self.models)], check=True
        )

    def drafter(self, model: str) -> dict[str, Any]:
        """vLLM's settings for a block drafter of six tokens."""
        return {
            "method": "dflash",
            "model": str(self.models / model),
            "num_speculative_tokens": 6,
        }

    def run(
        self, *, target: str, env: dict[str, str] | None = None, **asked
    ) -> Outcome:
        """The outcome of a scenario; see scenario.py for what may be asked."""
        asked = {"prompts": PROMPTS, **asked, "target": str(self.models / target)}
        settings = {"MLA_DECODE_VLLM": "auto", **(env or {})}
        key = json.dumps([asked, settings], sort_keys=True)
        if key not in self.known:
            self.known[key] = self._start(asked, settings)
        return self.known[key]

    def _start(self, asked: dict[str, Any], settings: dict[str, str]) -> Outcome:
        began = time.monotonic()
        outcome = self.path / f"outcome-{len(self.known)}.json"
        done = subprocess.run(
            [
                sys.executable,
                str(ENGINE / "scenario.py"),
                json.dumps(asked),
                str(outcome),
            ],
            env={
                **os.environ,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "HF_HUB_OFFLINE": "1",
                "TORCHDYNAMO_DISABLE": "1",  # compiling takes longer than the run
                "PYTHONPATH": os.pathsep.join([str(self.path), str(ENGINE)]),
                **settings,
            },
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        self.notes.append(f"an engine took {time.monotonic() - began:.0f} s")
        log = done.stdout + done.stderr
        said = {}
        if done.returncode == 0:
            said = json.loads(outcome.read_text(encoding="utf-8"))
        return Outcome(returncode=done.returncode, log=log, said=said)


NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config) -> None:
    config.stash[NOTES] = []
    for category in (
        "DeprecationWarning",
        "FutureWarning",
    ):  # importing vLLM gives many
        config.addinivalue_line("filterwarnings", f"ignore::{category}")


def pytest_terminal_summary(terminalreporter, config) -> None:
    for note in config.stash[NOTES]:
        terminalreporter.write_line(note)


@pytest.fixture(scope="session")
def engines(tmp_path_factory, pytestconfig) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"), pytestconfig.stash[NOTES])


@pytest.fixture(scope="session")
def stock(engines) -> Outcome:
    """vLLM's own CPU_MLA, without speculation: what all others must equal."""
    return engines.run(target="random", env={"MLA_DECODE_VLLM": "off"})
