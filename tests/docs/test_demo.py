"""The demo runs, and finds its own answers right."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest

from batcher.config import ModelConfig, from_mapping
from docs.documents import ROOT


@pytest.mark.e2e
@pytest.mark.slow
def test_quick_demo_ends_well() -> None:
    """`python -m demo --quick` serves, compares, stops its daemons and ends with 0."""
    done = subprocess.run(
        [sys.executable, "-m", "demo", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "exit codes [0, 0]" in done.stdout


def test_stand_in_is_a_model_file() -> None:
    """The demo's stand-in for a GPU is a `model.toml` that the daemon takes."""
    code = "from demo.__main__ import STAND_IN; print(STAND_IN)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    config = from_mapping(ModelConfig, tomllib.loads(done.stdout), "demo")

    assert config.fake is not None
    assert config.fake.base_ms == 10
