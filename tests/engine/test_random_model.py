"""The random model of the tests is the same on every machine and is made once."""

import shutil
import threading
import warnings
from pathlib import Path

from inferry.engine.tokenizer import HfTokenizer
from support.random_model import ensure_random_model

FILES = {
    "config.json",
    "generation_config.json",
    "random-model.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_same_bytes_come_out_every_time_and_a_complete_one_is_reused(tiny_dir: Path, tmp_path: Path) -> None:
    again = ensure_random_model(tmp_path / "again")
    assert {path.name for path in again.iterdir()} == FILES
    for name in FILES:
        assert (again / name).read_bytes() == (tiny_dir / name).read_bytes(), name
    (again / "note").write_text("still here")
    assert (ensure_random_model(again) / "note").exists()


def test_a_broken_model_directory_is_replaced(tiny_dir: Path, tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    shutil.copytree(tiny_dir, directory)
    (directory / "random-model.json").write_text('{"version": "0"}')
    (directory / "model.safetensors").write_bytes(b"")
    ensure_random_model(directory)
    assert (directory / "model.safetensors").stat().st_size > 1_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_two_processes_may_create_the_model_at_once(tmp_path: Path) -> None:
    makers = [threading.Thread(target=ensure_random_model, args=(tmp_path / "tiny",)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert {path.name for path in (tmp_path / "tiny").iterdir()} == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_transformers_reads_the_tokenizer_alike(tiny_dir: Path, tokenizer: HfTokenizer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(tiny_dir)
    messages: list[dict[str, object]] = [{"role": "user", "content": "Grüße, 世界!"}]
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.render_chat(messages)
    assert theirs.encode("def f(x): return x") == tokenizer.encode("def f(x): return x")
