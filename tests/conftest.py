"""Fixtures that several test files share."""

from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="session")
def good(tmp_path_factory) -> Path:
    """A checkpoint that answers `tiny.ANSWER`; its context is 256 tokens."""
    hf, weights = tiny.answering(tiny.ANSWER)
    return tiny.write(tmp_path_factory.mktemp("good"), hf, weights=weights)
