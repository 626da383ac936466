"""Grammars of sequences: compiled by threads of their own, matched by the engine's thread.

A grammar that was compiled before is copied from a cache. Its key is a digest of the constraint: the cache retains no
text, and tenants with the same schema share its grammar, which holds nothing of their outputs.
"""

import json
import re
import threading
from collections import OrderedDict
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from inferry.domain.constraints import Constraint
from inferry.domain.workers import ToolFormatName
from inferry.engine.grammar_text import GrammarTooLarge, grammar_text, is_gbnf
from inferry.engine.matcher import Matcher
from inferry.engine.sequences import Sequence
from inferry.engine.tool_formats import format_named

COMPILE_TIMEOUT_S = 10.0
NOT_STARTED = "the engine compiles other grammars"
_MAX_CACHED = 256
_MAX_ERROR_CHARS = 200
_THREADS = 8
"""Each compiles one grammar: this many slow ones at a time delay no other call."""
# llguidance recurses along chains of references and rules. The usual 8 MiB are too few for some thousands of them.
_STACK_BYTES = 256 << 20
_PLACE = re.compile(r"^at \d+\(\d+\): ")
_LISTING = re.compile(r"^ *\d+ \| ", re.MULTILINE)
# A fifth of llguidance's default: the memory of a lexer's states is that of one sequence.
_MAX_LEXER_STATES = 50_000


class InvalidGrammar(Exception):
    """The grammar cannot be compiled. The message may quote it: it is for the caller only."""


class _Compilation(NamedTuple):
    sequence: Sequence
    key: bytes
    output_ids: list[int]
    compiled: "Future[Matcher]"
    started_at: float


class Grammars:
    """Compiles grammars for one tokenizer. The engine's thread calls all methods."""

    def __init__(
        self, model_dir: Path, vocab_size: int, eos_ids: frozenset[int], tool_format: ToolFormatName | None
    ) -> None:
        self._threads = _started_threads()
        self._tool_format = tool_format
        self._loaded = self._threads.submit(_load, model_dir, vocab_size, sorted(eos_ids))
        self._cache: OrderedDict[bytes, Matcher] = OrderedDict()
        self._compiling: dict[int, _Compilation] = {}

    def wait_until_loaded(self) -> None:
        """Wait for the tokenizer. Without one that llguidance knows, every grammar fails."""
        wait([self._loaded])

    @property
    def is_compiling(self) -> bool:
        return bool(self._compiling)

    def start(self, sequence: Sequence, constraint: Constraint, output_ids: list[int], now: float) -> None:
        """Get the sequence a matcher, in the state after `output_ids`. `collect` returns the sequence later."""
        key = _key(constraint)
        known = self._cache.get(key)
        compiled: Future[Matcher]
        if known is None:
            compiled = self._threads.submit(self._compile, constraint)
        else:
            compiled = Future()
            compiled.set_result(known)
        self._compiling[sequence.key] = _Compilation(sequence, key, output_ids, compiled, now)

    def discard(self, key: int) -> None:
        """The sequence with this key has ended."""
        found = self._compiling.pop(key, None)
        if found is not None:
            found.compiled.cancel()

    def collect(self, now: float, timeout_s: float) -> list[tuple[Sequence, str | None]]:
        """Sequences that have their matchers, or an error. Waits up to `timeout_s` for the first one."""
        if timeout_s:
            wait([one.compiled for one in self._compiling.values()], timeout_s, FIRST_COMPLETED)
        found: list[tuple[Sequence, str | None]] = []
        for one in list(self._compiling.values()):
            if one.compiled.done():
                found.append((one.sequence, self._receive(one)))
            elif now - one.started_at > COMPILE_TIMEOUT_S:
                is_queued = one.compiled.cancel()
                reason = NOT_STARTED if is_queued else f"it cannot be compiled within {COMPILE_TIMEOUT_S:.0f} s"
                found.append((one.sequence, reason))
        for sequence, _ in found:
            self.discard(sequence.key)
        return found

    def _receive(self, one: "_Compilation") -> str | None:
        """Give a sequence its matcher; an error where there is none."""
        error = one.compiled.exception()
        if error is not None:
            return str(error) if isinstance(error, InvalidGrammar) else f"compiling failed ({type(error).__name__})"
        self._cache[one.key] = one.compiled.result()
        self._cache.move_to_end(one.key)
        if len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        matcher = self._cache[one.key].copy()
        if not all(map(matcher.consume, one.output_ids)):
            return "the output of an earlier attempt does not match it"
        one.sequence.matcher = matcher
        return None

    def _compile(self, constraint: Constraint) -> Matcher:
        import llguidance
        from llguidance.gbnf_to_lark import gbnf_to_lark

        tokenizer, special_ids = self._loaded.result()
        form = None if self._tool_format is None else format_named(self._tool_format, special_ids)
        try:
            text = grammar_text(constraint, form)
            if constraint.lark is not None and is_gbnf(text):
                text = gbnf_to_lark(text)
        except GrammarTooLarge as error:
            raise InvalidGrammar(str(error)) from None
        except (ValueError, RecursionError):
            raise InvalidGrammar("it is not valid") from None
        limits = llguidance.LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            # The message ends with the grammar and begins with a place in it, which the caller has not written.
            message = _PLACE.sub("", _LISTING.split(matcher.get_error())[0])
            raise InvalidGrammar(" ".join(message.split())[:_MAX_ERROR_CHARS])
        matcher.compute_bitmask()  # a grammar that nothing matches fails here
        if matcher.is_error():
            raise InvalidGrammar("no output can match it")
        return Matcher(matcher)


def _started_threads() -> ThreadPoolExecutor:
    """Threads with large stacks. All start now: the size of a stack is a setting of the process."""
    threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
    all_started = threading.Barrier(_THREADS)
    usual_bytes = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(_THREADS):
            threads.submit(all_started.wait)  # a thread that waits is not idle: each call starts one
    finally:
        threading.stack_size(usual_bytes)
    return threads


def _load(model_dir: Path, vocab_size: int, eos_ids: list[int]) -> tuple[Any, dict[str, int]]:
    """llguidance's tokenizer of a model, which takes about a second, and the ids of its special tokens by text."""
    import llguidance

    config = json.loads((model_dir / "tokenizer.json").read_text())
    config["padding"] = config["truncation"] = None
    special_ids = {token["content"]: token["id"] for token in config.get("added_tokens", ()) if token["special"]}
    return llguidance.LLTokenizer(json.dumps(config), n_vocab=vocab_size, eos_token=eos_ids), special_ids


def _key(constraint: Constraint) -> bytes:
    return blake2b(msgspec.msgpack.encode(replace(constraint, param="")), digest_size=32).digest()
