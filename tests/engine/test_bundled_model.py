"""The bundled model: its files, its prompts, and its tokens beside those of transformers."""

import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from inferry.cli.config.schema import ConfigError
from inferry.cli.config.workers import EmbeddedWorkerConfig
from inferry.cli.main import app
from inferry.cli.worker_wiring import make_worker
from inferry.domain.clock import SystemClock
from inferry.domain.lanes import Lane
from inferry.engine import bundled
from inferry.engine.bundled import BUNDLED_DIRECTORY, BUNDLED_MODEL, BUNDLED_VERSION, check_bundled_model
from inferry.engine.messages import Request
from inferry.engine.tokenizer import HfTokenizer
from support.checkpoints import reference_model
from support.children import environment
from support.engine_fixtures import TIE, Teacher, generate, greedy
from support.serving import Serving, post
from training.triage import train
from training.triage.documents import Document, Message
from training.triage.tokens import CONTEXT, END, Encoder

ROOT = Path(__file__).parents[2]
FILES = {
    "config.json",
    "generation_config.json",
    "inferry-triage.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
MAX_BYTES = 12_000_000
TICKETS = {
    "I was charged twice this month.": "billing",
    "My parcel has not arrived.": "delivery",
    "I cannot log in, my password is refused.": "login",
    "Please cancel my subscription.": "cancellation",
    "The app crashes when I open it.": "bug",
}


@pytest.fixture(scope="module")
def tokens() -> HfTokenizer:
    return HfTokenizer(BUNDLED_DIRECTORY)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The gateway as `inferry serve` runs it without a configuration."""
    with Serving(tmp_path_factory.mktemp("bundled")) as gateway:
        yield gateway


def user(text: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": text}]


def test_the_directory_has_a_checkpoint_of_at_most_twelve_megabytes() -> None:
    check_bundled_model(BUNDLED_DIRECTORY)
    assert {path.name for path in BUNDLED_DIRECTORY.iterdir()} == FILES
    assert sum(path.stat().st_size for path in BUNDLED_DIRECTORY.iterdir()) <= MAX_BYTES


def test_an_installed_package_contains_it(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=ROOT, env=environment(INFERRY_COMPILED="0"), check=True, capture_output=True)
    assert {path.name for path in (tmp_path / "lib" / "inferry" / "engine" / "triage").iterdir()} == FILES


def test_training_writes_the_version_that_the_engine_needs() -> None:
    assert train.VERSION == BUNDLED_VERSION


@pytest.mark.parametrize(
    ("marker", "problem"),
    [
        ('{"version": "2"}', f"has version 2 and this inferry needs version {BUNDLED_VERSION}: install inferry again"),
        ("{}", "has no bundled model: install inferry again"),
        (None, "has no bundled model: install inferry again"),
    ],
)
def test_another_version_is_an_error_that_names_both(
    marker: str | None, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if marker is not None:
        (tmp_path / "inferry-triage.json").write_text(marker)
    with pytest.raises(ValueError, match=problem):
        check_bundled_model(tmp_path)
    monkeypatch.setattr("inferry.cli.worker_wiring.BUNDLED_DIRECTORY", tmp_path)
    with pytest.raises(ConfigError, match=f"worker `local`: .*{problem}"):
        make_worker(EmbeddedWorkerConfig(name="local"), SystemClock())


def test_it_can_be_served_by_the_embedded_engine() -> None:
    result = CliRunner().invoke(app, ["models", "check", str(bundled.BUNDLED_DIRECTORY), "--device", "cpu"])
    assert result.exit_code == 0, result.output


def test_prompts_are_those_of_training(tokens: HfTokenizer) -> None:
    """The chat template gives the ids that a document of training has, and its text comes back."""
    messages = (Message("system", "You sort mail."), Message("user", "Grüße, order 88213!"), Message("assistant", "ok"))
    encoder = Encoder((BUNDLED_DIRECTORY / "tokenizer.json").read_text(encoding="utf-8"))
    trained = encoder.encode(Document("classify", messages), is_loose=False).ids.tolist()
    asked: list[dict[str, object]] = [{"role": one.role, "content": one.content} for one in messages[:-1]]
    prompt = tokens.encode_chat(asked)
    assert trained[: len(prompt)] == prompt
    assert tokens.decode(trained[len(prompt) : -1]) == "ok"
    assert trained[-1] == END
    assert tokens.decode(tokens.encode("Grüße, 世界! Order 88213")) == "Grüße, 世界! Order 88213"


def test_transformers_renders_the_same_prompt(tokens: HfTokenizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        theirs: Any = AutoTokenizer.from_pretrained(BUNDLED_DIRECTORY)
    messages = user("Classify this ticket: 世界")
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == tokens.render_chat(messages)
    assert theirs.encode(rendered, add_special_tokens=False) == tokens.encode_chat(messages)


def test_greedy_tokens_are_those_of_transformers(tokens: HfTokenizer) -> None:
    texts = [*(f"Write a reply to this ticket: {ticket}" for ticket in TICKETS), "Hello", "Classify: my order 88213"]
    prompts = {key: tokens.encode_chat(user(text)) for key, text in enumerate(texts)}
    requests = [Request(key, prompt, greedy(24), Lane.P1) for key, prompt in prompts.items()]
    outputs = generate(BUNDLED_DIRECTORY, requests)
    model = reference_model(BUNDLED_DIRECTORY)
    for key, prompt in prompts.items():
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + outputs[key]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(outputs[key]).unsqueeze(1)).squeeze(1)
        assert len(outputs[key]) == 24
        assert float((logits.max(dim=1).values - chosen).max()) <= TIE, texts[key]


def test_a_long_context_gives_finite_logits(tokens: HfTokenizer) -> None:
    """Training has texts of up to 512 tokens; the context is larger."""
    length = CONTEXT // 2
    prompt = (tokens.encode("The parcel of order 88213 has not arrived. ") * 1_000)[:length]
    assert len(prompt) == length
    assert bool(torch.isfinite(Teacher(BUNDLED_DIRECTORY).logits(prompt)).all())


@pytest.mark.parametrize("ticket", TICKETS)
def test_the_default_worker_classifies_a_ticket(ticket: str, served: Serving) -> None:
    messages = user(f"Classify this ticket: {ticket}")
    body = {"model": BUNDLED_MODEL, "messages": messages, "max_tokens": 16, "temperature": 0}
    status, _, answer = post(served.url, "/v1/chat/completions", body)
    assert status == 200
    assert answer["choices"][0]["message"]["content"] == TICKETS[ticket]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_default_worker_embeds(served: Serving) -> None:
    status, _, answer = post(served.url, "/v1/embeddings", {"model": BUNDLED_MODEL, "input": list(TICKETS)})
    assert status == 200
    assert len(answer["data"]) == len(TICKETS)
    for one in answer["data"]:
        assert math.isclose(sum(value * value for value in one["embedding"]), 1, rel_tol=1e-4)
