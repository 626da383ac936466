from pathlib import Path

import pytest

from inferry.engine.tiny import ensure_tiny_model
from inferry.engine.tokenizer import HfTokenizer


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path) -> HfTokenizer:
    return HfTokenizer(tiny_dir)
