"""Prefill and decode apart, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_RULES = ("tests/domain/test_prefill_rules.py",)
_CALLS = ("tests/dispatch/test_prefill.py",)

GROUP = MutantGroup(
    tests=(*_RULES, *_CALLS, "tests/cli/test_worker_roles.py"),
    mutants=(
        Mutant(
            "a prefill worker takes whole calls",
            "scheduling/placement/filters.py",
            '(view.role == "prefill") == (route.role == "prefill")',
            'view.role == "prefill" or route.role != "prefill"',
            _CALLS,
        ),
        Mutant(
            "short prompts are computed apart",
            "dispatch/prefill_router.py",
            "tokens >= view.min_prefill_tokens",
            "tokens >= 0",
            _CALLS,
        ),
        Mutant(
            "a prompt is computed apart although nothing can take its KV",
            "dispatch/prefill_router.py",
            'any(view.role == "decode" for view',
            'any(view.role != "prefill" for view',
            _CALLS,
        ),
        Mutant(
            "a job waits for a prefill worker that is down",
            "dispatch/loop.py",
            '        if view.role == "prefill":\n            self._release_stranded()\n',
            "",
            _CALLS,
        ),
        Mutant(
            "a refused prefill fails the call",
            "workers/openai_http/prefill_call.py",
            "            end = replace(end, error=refusal)\n",
            "            assert refusal\n",
            _CALLS,
        ),
        Mutant(
            "KV that cannot be fetched fails the call",
            "workers/openai_http/calls.py",
            "if prefill is not None and prefill.is_handed_over and not self.has_tokens:",
            "if prefill is not None and self.has_tokens:",
            _CALLS,
        ),
        Mutant(
            "KV is fetched twice",
            "domain/recovery.py",
            "    if job.route.role is not None:\n        job = computed_whole(job)\n",
            "",
            _RULES,
        ),
        Mutant(
            "the tokens of a prompt are counted twice",
            "domain/attempts.py",
            "return Usage(gpu_seconds=gpu_seconds)",
            "return Usage(usage.prompt_tokens, usage.cached_tokens, 0, gpu_seconds)",
            _CALLS,
        ),
        Mutant(
            "the GPU time of a prefill costs nothing",
            "domain/recovery.py",
            "(usage.gpu_seconds or 0.0) + job.prefill.gpu_seconds",
            "usage.gpu_seconds",
            _RULES,
        ),
        Mutant(
            "a prefill counts as a loss",
            "domain/recovery.py",
            " - (job.prefill is not None)",
            "",
            _RULES,
        ),
        Mutant(
            "the stop strings of a call end its prefill",
            "workers/openai_http/request_bodies.py",
            '{"stream", "stream_options", "stop", "stop_token_ids", "ignore_eos"}',
            '{"stream", "stream_options"}',
            _CALLS,
        ),
        Mutant(
            "KV goes to any worker",
            "scheduling/placement/route_filter.py",
            'if self.key.role == "decode":',
            'if self.key.role == "other":',
            _CALLS,
        ),
    ),
)
