"""Limits that vLLM reports after its start, and requests in vLLM's terms."""

from typing import Any

from inferry.engine.messages import Rejected, Request


class VllmLimits:
    """The context, vocabulary and KV cache of a vLLM engine, and the sampling parameters and refusals that follow."""

    def __init__(self, config: Any) -> None:
        self.context_tokens: int = config.model_config.max_model_len
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.blocks: int = config.cache_config.num_gpu_blocks or 0
        self.block_tokens: int = config.cache_config.block_size
        generation = config.model_config.try_get_generation_config()
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = getattr(config.model_config.hf_config, "eos_token_id", None)
        self.eos_ids: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else sorted(eos)

    @property
    def kv_tokens(self) -> int:
        return self.blocks * self.block_tokens

    @property
    def max_request_tokens(self) -> int:
        """Most tokens of one request. vLLM reserves one KV block."""
        return min(self.context_tokens, self.kv_tokens - self.block_tokens)

    def rejection(self, request: Request) -> Rejected | None:
        tokens = len(request.prompt_ids)
        if not tokens:
            return Rejected(request.key, False, "the prompt is empty")
        if request.sampling.max_tokens < 1:
            return Rejected(request.key, False, "max_tokens must be at least 1")
        if tokens >= self.max_request_tokens:
            context = self.max_request_tokens
            message = f"the prompt has {tokens} tokens; the context of {context} tokens leaves none for output"
            return Rejected(request.key, True, message)
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= self.vocab_size:
            return Rejected(request.key, False, f"the prompt has token ids outside 0 to {self.vocab_size - 1}")
        return None

    def sampling(self, request: Request) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        requested = request.sampling
        return SamplingParams(
            temperature=requested.temperature,
            top_p=requested.top_p,
            top_k=requested.top_k or 0,
            seed=requested.seed,
            max_tokens=min(requested.max_tokens, self.max_request_tokens - len(request.prompt_ids)),
            # End-of-turn tokens of the model's generation config. vLLM handles the plain EOS token itself.
            stop_token_ids=sorted({*requested.stop_token_ids, *(() if requested.ignore_eos else self.eos_ids)}),
            ignore_eos=requested.ignore_eos,
            detokenize=False,  # the gateway detokenises
            output_kind=RequestOutputKind.DELTA,
        )


def prompt_of(request: Request) -> dict[str, Any]:
    """The prompt for vLLM. The salt enters the hash of the first KV block, and so of all later blocks."""
    prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids}
    if request.salt is not None:
        prompt["cache_salt"] = request.salt
    return prompt
