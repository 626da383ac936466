"""A small Llama's directory as a GGUF file: write_gguf.py DIRECTORY FILE. Runs where `gguf` is installed."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
from safetensors.numpy import load_file

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def main(directory: Path, path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, directory, config)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in load_file(directory / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.rpartition(".")[2] in heads:
            weight = _interleave(weight, heads[stem.rpartition(".")[2]])
        writer.add_tensor(_gguf_name(stem), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: Any, directory: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    ids = {**tokenizer["model"]["vocab"], **special}
    tokens = sorted(ids, key=lambda token: int(ids[token]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    writer.add_token_types([kinds[token in special] for token in tokens])
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(True)
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])


def _gguf_name(stem: str) -> str:
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[rest]}.weight"


def _interleave(weight: Any, heads: int) -> Any:
    """Rows in the order of llama.cpp's rotary embedding, which pairs neighbours instead of halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
