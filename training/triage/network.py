"""A small Llama for training, with the parameter names of Hugging Face checkpoints."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from training.triage.tokens import BOS, CONTEXT, END, EOS, PAD, VOCABULARY, write_json


@dataclass(frozen=True)
class Shape:
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.2


class Norm(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.hidden))
        self._eps = shape.norm_eps

    def forward(self, states: Tensor) -> Tensor:
        return F.rms_norm(states, self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, wide, bias=False)
        self.k_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.v_proj = nn.Linear(shape.hidden, narrow, bias=False)
        self.o_proj = nn.Linear(wide, shape.hidden, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = states.shape
        shape = self._shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, shape.head_dim).transpose(1, 2)

        query = _rotated(heads(self.q_proj(states)), cosine, sine)
        key = _rotated(heads(self.k_proj(states)), cosine, sine)
        value = heads(self.v_proj(states))
        group = shape.heads // shape.kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.o_proj(seen.transpose(1, 2).reshape(batch, length, -1))
        return out


def _rotated(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, -1)
    return (states * cosine + torch.cat([-second, first], -1) * sine).to(states.dtype)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape)
        self.mlp = Mlp(shape)
        self._dropout = shape.dropout

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(states), cosine, sine)
        states = states + F.dropout(attended, self._dropout, self.training)
        changed = self.mlp(self.post_attention_layernorm(states))
        return states + F.dropout(changed, self._dropout, self.training)


class Network(nn.Module):
    """Logits of the next token. Input and output embeddings are one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * shape.layers) ** 0.5 if is_output else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        shape = self.shape
        positions = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)
        steps = torch.arange(0, shape.head_dim, 2, device=ids.device, dtype=torch.float32)
        angles = torch.outer(positions, shape.rope_theta ** (-steps / shape.head_dim)).repeat(1, 2)
        states = self.embed_tokens(ids)
        cosine, sine = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
        states = F.dropout(states, shape.dropout, self.training)
        for layer in self.layers:
            states = layer(states, cosine, sine)
        return F.linear(self.norm(states), self.embed_tokens.weight)


def write_checkpoint(directory: Path, network: Network) -> None:
    """Weights as float16 and the configuration, as Hugging Face's libraries read them."""
    weights = {f"model.{name}": value.to("cpu", torch.float16) for name, value in network.state_dict().items()}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    write_json(directory / "config.json", _model_config(network.shape))
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, END], "pad_token_id": PAD}
    write_json(directory / "generation_config.json", generation)


def _model_config(shape: Shape) -> dict[str, Any]:
    sizes = asdict(shape)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["intermediate"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "head_dim": sizes["head_dim"],
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": sizes["norm_eps"],
        "rope_theta": sizes["rope_theta"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "torch_dtype": "float16",
    }
