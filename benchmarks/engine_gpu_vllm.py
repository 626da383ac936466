"""vLLM's offline throughput on the requests of `benchmarks.engine_gpu`. Runs with an interpreter that has vLLM.

It imports nothing of the project: vLLM needs an environment of its own.
"""

import argparse
import json
import random
import time
from pathlib import Path

VOCABULARY = 128_256
PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128


def write_model(directory: Path) -> None:
    """The config of Llama 3.1 8B, without weights."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 4_096,
        "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 8_192, "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 128_000, "eos_token_id": 128_001, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def prompts_of(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(1, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def main() -> None:
    from vllm import LLM, SamplingParams

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--chunk-tokens", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")]
    engine = LLM(
        model=arguments.model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=8_192,
        max_num_seqs=max(sizes),
        max_num_batched_tokens=arguments.chunk_tokens,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=False,
        attention_config={"backend": "FLASH_ATTN"},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)

    def run(count: int, seed: int) -> float:
        prompts = [{"prompt_token_ids": ids} for ids in prompts_of(count, seed)]
        started = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert sum(len(one.outputs[0].token_ids) for one in outputs) == count * OUTPUT_TOKENS
        return seconds

    run(2, 1)
    run(max(sizes), 2)
    results = {}
    for count in sizes:
        spent = sorted(run(count, seed) for seed in (11, 12, 13)[: 3 if count < 128 else 2])
        seconds = spent[(len(spent) - 1) // 2]
        results[str(count)] = {"tokens_per_s": count * OUTPUT_TOKENS / seconds, "seconds": seconds}
        print(f"vLLM n={count:4d} {results[str(count)]}", flush=True)
    arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
