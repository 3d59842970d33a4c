"""What the tests of the TensorRT back end share."""

from __future__ import annotations

import os

import pytest

from engines.errors import EngineLoadError
from engines.tensorrt.module import TensorRT, load


@pytest.fixture(scope="session")
def rtx() -> TensorRT:
    """TensorRT for RTX; it builds plans without a GPU.

    Where it is not installed the test is skipped, but never in CI.
    """
    try:
        return load("tensorrt_rtx")
    except EngineLoadError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
