"""Step costs of an engine in seconds, and the flags it was started with."""

from math import sqrt
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

MODELS = Path(__file__).parent / "models"
DEFAULT_MODEL = MODELS / "h200-vllm-8b.json"


class CostModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds. A step takes `base_s` plus its contents:

    `prefill_step_s` once if any prompt tokens are computed (negative where they overlap with the rest of the step;
    prompts never make a step shorter), `prefill_token_s` per prompt token, `sequence_s` per decoding sequence,
    `kv_token_s` per KV token that decoding sequences read, and `attention_pair_s` per pair of a prompt token and a
    context token before it.

    The server process in front of the engine handles one item at a time. Before the engine gets a request it spends
    `request_s` and `request_token_s` per prompt token on it, in `request_turns` turns that alternate with other work.
    It spends `message_s` on the output of every step, `token_s` on every token it sends, and `token_context_s` per
    context token before that token: a detokenizer that finds no readable text in a stream reads all of it again with
    every token. `reply_s` is the remaining time of a token on its way to the client.
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
        """A step in which every sequence reads its KV and produces one token."""
        return self.base_s + self.sequence_s * sequences + self.kv_token_s * kv_tokens

    def decode_steps_s(self, sequences: int, kv_tokens: int, steps: int) -> float:
        """Consecutive decode steps of the same sequences; their KV grows by one token each per step."""
        one = self.decode_s(sequences, kv_tokens)
        return steps * one + self.kv_token_s * sequences * (steps * (steps - 1) / 2)

    def decode_steps_begun(self, sequences: int, kv_tokens: int, elapsed_s: float, most: int) -> int:
        """How many of `most` such steps have begun after this time, at least one."""
        slope = self.kv_token_s * sequences / 2
        # steps * linear + steps² * slope = elapsed_s
        linear = self.decode_s(sequences, kv_tokens) - slope
        guess = (
            elapsed_s / linear if slope <= 0 else (sqrt(linear * linear + 4 * slope * elapsed_s) - linear) / (2 * slope)
        )
        steps = max(1, int(guess))
        while steps > 1 and self.decode_steps_s(sequences, kv_tokens, steps - 1) >= elapsed_s:
            steps -= 1
        while steps < most and self.decode_steps_s(sequences, kv_tokens, steps) < elapsed_s:
            steps += 1
        return steps

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """What prompt tokens add to a step."""
        return max(0.0, self.prefill_step_s + self.prefill_token_s * tokens + self.attention_pair_s * pairs)

    def delivery_s(self, tokens: int, context_tokens: int) -> float:
        """Time of the server process for the tokens of one step."""
        return self.message_s + self.token_s * tokens + self.token_context_s * context_tokens

    def request_cost_s(self, prompt_tokens: int) -> float:
        """Time of the server process for a request, all turns together."""
        return self.request_s + self.request_token_s * prompt_tokens


class EngineFlags(Struct, frozen=True, kw_only=True):
    """How the engine was started. `max_num_batched_tokens` bounds the tokens computed in one step.

    `works_ahead`: the next step is put together while the current one runs, so a sequence that arrives meanwhile can
    enter only the one after (vLLM's asynchronous scheduling).
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
    """A cost model, the rows it was fitted on, and its residuals."""

    name: str
    costs: CostModel
    flags: EngineFlags = EngineFlags()
    fitted_on: tuple[str, ...] = ()
    residuals: dict[str, dict[str, float]] = {}


def load_model(path: Path = DEFAULT_MODEL) -> EngineModel:
    return msgspec.json.decode(path.read_bytes(), type=EngineModel)
