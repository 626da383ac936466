"""What an engine costs in time, and the flags it was started with."""

from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

MODELS = Path(__file__).parent / "models"
DEFAULT_MODEL = MODELS / "h200-vllm-8b.json"


class CostModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. A step takes `base_s`, and on top what is in it:

    `prefill_step_s` once if any prompt tokens are computed (negative where they hide behind what the step does anyway;
    prompts never make a step shorter), then per prompt token, per decoding sequence, per KV token that decoding
    sequences read, and per pair of a prompt token and a token of context before it.

    The server in front of the engine is one process that does one thing after the other. It spends `request_s` and
    `request_token_s` per prompt token on a request before the engine hears of it, in `request_turns` turns between
    which others have theirs; `message_s` on what every step sends
    it, `token_s` on every token it passes on, and `token_context_s` for every token of context before that token: a
    detokenizer that finds no readable text in a stream reads all of it again with every token. `reply_s` is what a
    token needs on its way to the client besides.
    """

    base_s: float
    prefill_step_s: float = 0.0
    prefill_token_s: float
    sequence_s: float
    kv_token_s: float
    attention_pair_s: float = 0.0
    request_s: float = 0.0
    request_turns: int = 1
    request_token_s: float = 0.0
    message_s: float = 0.0
    token_s: float = 0.0
    token_context_s: float = 0.0
    reply_s: float = 0.0

    def decode_s(self, sequences: int, kv_tokens: int) -> float:
        """A step in which every one of the sequences reads its KV and writes one token."""
        return self.base_s + self.sequence_s * sequences + self.kv_token_s * kv_tokens

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """What computing prompt tokens adds to a step."""
        return max(0.0, self.prefill_step_s + self.prefill_token_s * tokens + self.attention_pair_s * pairs)

    def delivery_s(self, tokens: int, context_tokens: int) -> float:
        """What the server spends on passing on the tokens of one step."""
        return self.message_s + self.token_s * tokens + self.token_context_s * context_tokens

    def request_cost_s(self, prompt_tokens: int) -> float:
        """What the server spends on a request, all turns together."""
        return self.request_s + self.request_token_s * prompt_tokens


class EngineFlags(Struct, frozen=True, kw_only=True):
    """How the engine was started. `max_num_batched_tokens` is the chunk: most tokens computed in one step.

    `works_ahead`: the next step is put together while the one before it runs, so that whoever comes meanwhile enters
    the one after (vLLM's asynchronous scheduling).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_tokens: int = 834_480
    block_tokens: int = 16
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True
    works_ahead: bool = False

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.block_tokens < 1 or self.kv_tokens < self.block_tokens:
            raise ValueError("an engine needs at least one sequence and one block")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                "max_num_batched_tokens must be at least max_num_seqs: every sequence decodes in every step"
            )

    @property
    def blocks(self) -> int:
        return self.kv_tokens // self.block_tokens


class EngineModel(Struct, frozen=True, kw_only=True):
    """A cost model with where it came from: the rows it was fitted on and what it gets wrong."""

    name: str
    costs: CostModel
    flags: EngineFlags = EngineFlags()
    fitted_on: tuple[str, ...] = ()
    residuals: dict[str, dict[str, float]] = {}


def load_model(path: Path = DEFAULT_MODEL) -> EngineModel:
    return msgspec.json.decode(path.read_bytes(), type=EngineModel)
