"""What all tests share. Its being here puts this folder on the import path, so that
`import models` finds the builders of tiny models from every folder below."""

from __future__ import annotations

from pathlib import Path

import pytest

_E2E = Path(__file__).parent / "e2e"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in `e2e/` is marked so."""
    for item in items:
        if _E2E in item.path.parents:
            item.add_marker(pytest.mark.e2e)
