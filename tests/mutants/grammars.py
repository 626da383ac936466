"""Grammars and tool calls, broken in one place at a time."""

from mutants.mutant import Mutant, MutantGroup

_ENGINE = ("tests/engine/test_grammars.py",)
_OUTPUTS = ("tests/engine/test_grammar_outputs.py",)
_OVERLAP = ("tests/engine/test_engine_overlap.py",)
_WRITER = ("tests/workers/test_tool_call_writer.py",)
_FIELDS = ("tests/ingress/openai/test_constraints.py",)
_FORMATS = ("tests/engine/test_tool_formats.py",)
_CLIENTS = ("tests/e2e/test_structured_outputs.py",)
_KERNELS = ("tests/engine/gpu/test_gpu_kernels.py",)
_GPU = ("tests/engine/gpu/test_gpu_runner.py",)

GROUP = MutantGroup(
    tests=(*_WRITER, *_FIELDS, *_FORMATS, *_OVERLAP, *_ENGINE, *_OUTPUTS, *_CLIENTS),
    mutants=(
        Mutant(
            "a token is planned before the one that its grammar depends on is known",
            "engine/runners.py",
            "if piece.sequence.matcher is None or piece.sequence.tokens[-1] != UNKNOWN",
            "if True",
            _OVERLAP,
        ),
        Mutant(
            "a complete output goes on",
            "engine/core.py",
            "(matcher is not None and matcher.is_complete)",
            "False",
            _ENGINE,
        ),
        Mutant(
            "a complete output at its limit ends with length",
            "engine/core.py",
            "(matcher is not None and matcher.is_complete)",
            "(matcher is not None and matcher.is_complete and place + 1 < sequence.limit)",
            _ENGINE,
        ),
        Mutant(
            "the matcher of a resumed sequence starts at the beginning",
            "engine/core.py",
            "prompt[len(prompt) - request.output_ids :]",
            "[]",
            _OUTPUTS,
        ),
        Mutant(
            "a sequence whose grammar is invalid runs",
            "engine/core.py",
            "if error is None and sequence.matcher is not None and not",
            "if sequence.matcher is None or not",
            _ENGINE,
        ),
        Mutant(
            "two sequences share one matcher",
            "engine/grammars.py",
            "matcher = self._cache[one.key].copy()",
            "matcher = self._cache[one.key]",
            _OUTPUTS,
        ),
        Mutant(
            "the cache of grammars grows without a limit",
            "engine/grammars.py",
            "if len(self._cache) > _MAX_CACHED:",
            "if False:",
            _ENGINE,
        ),
        Mutant(
            "a compilation has no limit of time",
            "engine/grammars.py",
            "elif now - one.started_at > COMPILE_TIMEOUT_S:",
            "elif False:",
            _ENGINE,
        ),
        Mutant(
            "a grammar that nothing matches is accepted",
            "engine/grammars.py",
            "matcher.compute_bitmask()",
            "pass",
            _ENGINE,
        ),
        Mutant(
            "options in a client's schema count",
            "engine/grammar_text.py",
            '{**decoded, "x-guidance": options}',
            '{"x-guidance": options, **decoded}',
            _ENGINE,
        ),
        Mutant(
            "calls are parallel against the client's wish",
            "engine/grammar_text.py",
            "is_parallel = constraint.is_parallel and bool(form.separator)",
            "is_parallel = bool(form.separator)",
            _ENGINE,
        ),
        Mutant(
            "a slash ends a regular expression",
            "engine/grammar_text.py",
            "_ESCAPE_OR_SLASH.sub(_escaped, constraint.regex)",
            "constraint.regex",
            _ENGINE,
        ),
        Mutant(
            "masks reach other rows",
            "engine/sampling.py",
            "logits[row].masked_fill_(",
            "logits.masked_fill_(",
            _ENGINE,
        ),
        Mutant(
            "the kernel reads the mask of another row",
            "engine/gpu/kernels/masks.py",
            "masks + which * WORDS",
            "masks + row * 0",
            _KERNELS,
        ),
        Mutant(
            "the GPU keeps the token that was chosen without a mask",
            "engine/gpu/sampling.py",
            "sampled[index] = logits[index].argmax(dim=1)",
            "pass",
            _GPU,
        ),
        Mutant(
            "a brace in a text ends the arguments of a call",
            "workers/in_process/tool_calls.py",
            "elif self._in_string:",
            "elif False:",
            _WRITER,
        ),
        Mutant(
            "the begin of a call across two pieces is text",
            "workers/in_process/tool_calls.py",
            "for size in range(min(len(begin) - 1, len(text)), -1, -1)",
            "for size in range(0, -1, -1)",
            _WRITER,
        ),
        Mutant(
            "calls end with stop",
            "workers/in_process/live_jobs.py",
            "finish = FinishReason.TOOL_CALLS",
            "finish = FinishReason.STOP",
            _CLIENTS,
        ),
        Mutant(
            "a named tool is not required",
            "ingress/openai/constraints.py",
            "return named, True",
            "return named, False",
            _FIELDS,
        ),
        Mutant(
            "tools are offered where none may be called",
            "ingress/openai/constraints.py",
            '(() if choice == "none" else specs)',
            "specs",
            _FIELDS,
        ),
        Mutant(
            "a strict schema may have keywords that are not enforced",
            "ingress/openai/json_schema.py",
            "if self._is_strict:",
            "if False:",
            _FIELDS,
        ),
        Mutant(
            "a schema may be nested without a limit",
            "ingress/openai/json_schema.py",
            "if depth > MAX_DEPTH:",
            "if False:",
            _FIELDS,
        ),
        Mutant(
            "tools for a template that takes none are dropped",
            "engine/tokenizer.py",
            "if self.tool_format is not None and not self._takes_tools:",
            "if False:",
            _FORMATS,
        ),
    ),
)
