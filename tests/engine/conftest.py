from pathlib import Path

import pytest
import torch

from inferry.engine.tokenizer import HfTokenizer


@pytest.fixture(scope="session")
def tiny_dir(tiny_model: Path) -> Path:
    return tiny_model


@pytest.fixture(scope="session")
def tokenizer(tiny_dir: Path) -> HfTokenizer:
    return HfTokenizer(tiny_dir)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads that wait for each other on a busy machine turn seconds into minutes."""
    torch.set_num_threads(1)
