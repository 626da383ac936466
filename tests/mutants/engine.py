"""The embedded engine, broken in one place at a time: blocks, planning, sampling, tokens."""

from mutants.mutant import Mutant, MutantGroup

_CORE = ("tests/engine/test_engine_bounds.py", "tests/engine/test_engine_core.py")
_PLANNER = ("tests/engine/test_engine_bounds.py", "tests/engine/test_engine_planner.py")
_SAMPLING = ("tests/engine/test_engine_bounds.py", "tests/engine/test_engine_sampling.py")
_TOKENIZER = ("tests/engine/test_engine_tokenizer.py", "tests/engine/test_byte_fallback.py")

GROUP = MutantGroup(
    tests=(*_CORE, *_PLANNER, "tests/engine/test_engine_blocks.py", *_SAMPLING, *_TOKENIZER),
    mutants=(
        Mutant(
            "a seed of nothing is none",
            "engine/core.py",
            "self._make_seed() if sampling.seed is None else sampling.seed",
            "sampling.seed or self._make_seed()",
            _CORE,
        ),
        Mutant(
            "a prompt may fill the whole context",
            "engine/core.py",
            "if tokens >= self.context_tokens:",
            "if tokens > self.context_tokens:",
            _CORE,
        ),
        Mutant(
            "a prompt may fill the whole cache",
            "engine/core.py",
            "if tokens >= self.kv_tokens:",
            "if tokens > self.kv_tokens:",
            _CORE,
        ),
        Mutant(
            "the vocabulary has one token more",
            "engine/core.py",
            "max(request.prompt_ids) >= self._runner.vocab_size",
            "max(request.prompt_ids) > self._runner.vocab_size",
            _CORE,
        ),
        Mutant(
            "no output at all may be asked for",
            "engine/core.py",
            "if request.sampling.max_tokens < 1:",
            "if request.sampling.max_tokens < 0:",
            _CORE,
        ),
        Mutant(
            "a stop token at the output limit ends with length",
            "engine/core.py",
            "            if token in sequence.stop_ids:\n",
            "            if token in sequence.stop_ids and len(sequence.tokens) < sequence.limit:\n",
            _CORE,
        ),
        Mutant(
            "ignore_eos also ignores stop tokens",
            "engine/core.py",
            "stop_ids=eos | frozenset(sampling.stop_token_ids)",
            "stop_ids=eos and eos | frozenset(sampling.stop_token_ids)",
            _CORE,
        ),
        Mutant(
            "time spent on the tokens of a step is given to each sequence",
            "engine/core.py",
            "sequence.gpu_seconds += scale * weight",
            "sequence.gpu_seconds += seconds / len(work)",
            _CORE,
        ),
        Mutant(
            "a preempted sequence keeps its computed tokens",
            "engine/core.py",
            "            sequence.computed = sequence.named_blocks = 0\n",
            "            sequence.named_blocks = 0\n",
            _CORE,
        ),
        Mutant(
            "the last free blocks are kept from newcomers",
            "engine/planner.py",
            "need + running_count <= free",
            "need + running_count < free",
            _PLANNER,
        ),
        Mutant(
            "one token more makes holding back worth it",
            "engine/planner.py",
            "if batch_tokens >= limits.min_held_tokens:",
            "if batch_tokens > limits.min_held_tokens:",
            _PLANNER,
        ),
        Mutant(
            "a new sequence overtakes a preempted one",
            "engine/planner.py",
            "() if preempted else waiting",
            "waiting",
            _PLANNER,
        ),
        Mutant(
            "a small newcomer slips past a large one",
            "engine/planner.py",
            "can_admit = can_admit and need + running_count <= free",
            "can_admit = need + running_count <= free",
            _PLANNER,
        ),
        Mutant(
            "a preempted sequence keeps its blocks",
            "engine/planner.py",
            "free += len(victim.blocks) if shared is None else shared.count_freed(victim.blocks, released)",
            "pass",
            _PLANNER,
        ),
        Mutant(
            "the last free block is never handed out",
            "engine/blocks.py",
            "if need > self.free:",
            "if need >= self.free:",
            ("tests/engine/test_engine_blocks.py",),
        ),
        Mutant(
            "a freed block is not the lowest",
            "engine/blocks.py",
            "        self._lowest = min(self._lowest, block)\n",
            "        self._lowest = block\n",
            ("tests/engine/test_engine_blocks.py",),
        ),
        Mutant(
            "a number on the border falls to a token of no weight",
            "engine/sampling.py",
            "numbers * reached[:, -1:], right=True)",
            "numbers * reached[:, -1:], right=False)",
            _SAMPLING,
        ),
        Mutant(
            "a number past the last weight falls to a token of no weight",
            "engine/sampling.py",
            "return torch.minimum(tokens, last).squeeze(1)",
            "return tokens.clamp(max=weights.shape[-1] - 1).squeeze(1)",
            _SAMPLING,
        ),
        Mutant(
            "one token too many is within top_p",
            "engine/sampling.py",
            "(before < top_p_limit * ordered.sum(dim=-1, keepdim=True))",
            "(before <= top_p_limit * ordered.sum(dim=-1, keepdim=True))",
            _SAMPLING,
        ),
        Mutant(
            "a top_p of nothing keeps nothing",
            "engine/sampling.py",
            " | (places == 0))",
            ")",
            _SAMPLING,
        ),
        Mutant(
            "top_p applies before top_k",
            "engine/sampling.py",
            "top_p_limit * ordered.sum(dim=-1, keepdim=True)",
            "top_p_limit",
            _SAMPLING,
        ),
        Mutant(
            "sequences of a step share random numbers",
            "engine/sampling.py",
            "best[row] = token",
            "best[drawn.index(row)] = token",
            _SAMPLING,
        ),
        Mutant(
            "a prompt begins with two BOS tokens",
            "engine/tokenizer.py",
            "return ids[1:] if doubled else ids",
            "return ids",
            _TOKENIZER,
        ),
        Mutant(
            "special tokens are part of the text",
            "engine/tokenizer.py",
            "skip_special_tokens=True",
            "skip_special_tokens=False",
            _TOKENIZER,
        ),
        Mutant(
            "a token is as long as its letters",
            "engine/tokenizer.py",
            "len(token.encode()) for token",
            "len(token) for token",
            _TOKENIZER,
        ),
    ),
)
