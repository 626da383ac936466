"""A small Llama with random weights from a seed.

Its tokenizer is trained on texts that ship with Python. Its output is meaningless, and the next token depends on all
tokens before it.
"""

import json
import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "1"
_MARKER = "random-model.json"
_SPECIAL = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_PAD, _BOS, _EOS = 0, 1, 2
_VOCABULARY = 4096
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM, _INTERMEDIATE = 256, 4, 4, 2, 64, 768
_CONTEXT = 16_384
_CORPUS = ("pydoc_data/topics.py", "argparse.py", "typing.py", "subprocess.py", "tarfile.py", "turtle.py", "inspect.py")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}"
    "{% elif message['role'] in ['system', 'developer'] %}{{ '<|system|>' }}"
    "{% elif message['role'] in ['user', 'tool'] %}{{ '<|user|>' }}"
    "{% else %}{{ raise_exception('roles are system, developer, user, assistant and tool') }}{% endif %}"
    "{{ message['content'] }}{{ '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def ensure_random_model(directory: Path) -> Path:
    """The model's directory, created if missing. Safe for concurrent processes."""
    if _is_complete(directory):
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        _write(draft)
        _move_into_place(draft, directory)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return directory


def _is_complete(directory: Path) -> bool:
    try:
        return bool(json.loads((directory / _MARKER).read_text())["version"] == VERSION)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _move_into_place(draft: Path, directory: Path) -> None:
    while True:
        try:
            draft.rename(directory)
            return
        except OSError:
            # The directory exists. Another process may have been faster; an older or broken one is moved away first,
            # because a directory cannot be replaced atomically.
            if _is_complete(directory):
                return
            old_directory = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
            try:
                directory.rename(old_directory / "old")
            except FileNotFoundError:
                pass
            shutil.rmtree(old_directory, ignore_errors=True)


def _write(directory: Path) -> None:
    tokenizer = _train_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[_BOS],
            "eos_token": _SPECIAL[_EOS],
            "pad_token": _SPECIAL[_PAD],
            "model_max_length": _CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    )
    _write_json(directory / "config.json", _model_config())
    _write_json(
        directory / "generation_config.json", {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
    )
    from safetensors.torch import save_file

    save_file(
        _make_weights(_allowed_tokens(tokenizer)), str(directory / "model.safetensors"), metadata={"format": "pt"}
    )
    _write_json(directory / _MARKER, {"version": VERSION})


def _model_config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": _BOS,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
        "torch_dtype": "float32",
    }


def _train_tokenizer() -> Any:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [(library / name).read_text(encoding="utf-8") for name in _CORPUS if (library / name).is_file()]
    tokenizer.train_from_iterator(texts, trainer)
    bos = _SPECIAL[_BOS]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, _BOS)])
    return tokenizer


def _allowed_tokens(tokenizer: Any) -> list[bool]:
    """Tokens that the model may generate: the end token, and all that are complete printable characters."""

    def readable(text: str) -> bool:
        return "\ufffd" not in text and all(character.isprintable() or character in "\n\t" for character in text)

    return [
        token == _EOS or (token >= len(_SPECIAL) and readable(tokenizer.decode([token])))
        for token in range(_VOCABULARY)
    ]


def _make_weights(allowed_tokens: list[bool]) -> "dict[str, Tensor]":
    """Random weights, scaled so that every layer changes the residual stream and the best logit is distinct."""
    import torch

    generator = torch.Generator().manual_seed(20_260_101)

    def normal(rows: int, columns: int, scale: float) -> "Tensor":
        return torch.randn(rows, columns, generator=generator) * scale

    weights = {"model.embed_tokens.weight": normal(_VOCABULARY, _HIDDEN, 1.0), "model.norm.weight": torch.ones(_HIDDEN)}
    fan = _HIDDEN**-0.5
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}self_attn.q_proj.weight": normal(_HEADS * _HEAD_DIM, _HIDDEN, 1.5 * fan),
            f"{prefix}self_attn.k_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN, 1.5 * fan),
            f"{prefix}self_attn.v_proj.weight": normal(_KV_HEADS * _HEAD_DIM, _HIDDEN, 2 * fan),
            f"{prefix}self_attn.o_proj.weight": normal(_HIDDEN, _HEADS * _HEAD_DIM, fan),
            f"{prefix}mlp.gate_proj.weight": normal(_INTERMEDIATE, _HIDDEN, fan),
            f"{prefix}mlp.up_proj.weight": normal(_INTERMEDIATE, _HIDDEN, 2 * fan),
            f"{prefix}mlp.down_proj.weight": normal(_HIDDEN, _INTERMEDIATE, 2 * _INTERMEDIATE**-0.5),
        }
    weights["lm_head.weight"] = normal(_VOCABULARY, _HIDDEN, 4 * fan) * torch.tensor(allowed_tokens).unsqueeze(1)
    return weights


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + os.linesep)
