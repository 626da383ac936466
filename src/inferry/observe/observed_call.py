"""The metadata of one call that `inferry observe` passed on: a ledger entry without anything of the prompt.

Keys, sessions and beginnings of prompts are recorded as hashes with a salt that is drawn at every start and not stored.
Times are seconds on the proxy's clock.
"""

import hashlib
import re
from collections.abc import Mapping

import msgspec
from msgspec import Raw, Struct

from inferry.domain.lanes import Lane, LanePolicy
from inferry.domain.ledger import LedgerEntry, Outcome
from inferry.domain.observed import SLICE_BYTES, UPSTREAM, Observed, ObservedFields

MAX_SLICES = 64
"""Of the beginning of a prompt: this many slices are hashed at most, each with all before it."""
BYTES_PER_TOKEN = 4
"""Assumed where the server reports no usage."""
_END_BYTES = 4096
"""Bytes at either end of a response that are searched for its usage."""
_LONGEST_KEY = len('"completion')
_TIERS = {"priority": Lane.P0, "default": Lane.P1, "flex": Lane.P2}
# A quote inside a JSON text is escaped, so these match keys only.
_PROMPT_TOKENS = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,9})')
_OUTPUT_TOKENS = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d{1,9})')
_TOKEN_PATTERNS = (_PROMPT_TOKENS, _OUTPUT_TOKENS, _CACHED_TOKENS)


class _Body(Struct):
    model: str = ""
    service_tier: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    system: Raw = Raw()
    messages: Raw = Raw()
    prompt: Raw = Raw()
    input: Raw = Raw()


class ResponseTimes:
    """When the parts of a response arrived. `tokens` are events so far, for a stream; `is_stream` once one has come."""

    __slots__ = (
        "_itl_s",
        "first_at",
        "head",
        "is_stream",
        "last_at",
        "late_s",
        "longest_gap_s",
        "size",
        "tail",
        "tokens",
    )

    def __init__(self, itl_s: float) -> None:
        self._itl_s = itl_s
        self.first_at: float | None = None
        self.last_at = self.late_s = self.longest_gap_s = 0.0
        self.tokens = self.size = 0
        self.head = self.tail = b""
        self.is_stream = False

    def arrived(self, piece: bytes, now: float) -> None:
        """A part of the body has arrived."""
        if self.first_at is None:
            self.first_at = self.last_at = now
            self.head = piece[:_END_BYTES]
            self.is_stream = piece.startswith((b"data:", b"event:"))
        elif now - self.last_at > self.longest_gap_s:
            self.longest_gap_s = now - self.last_at
        self.last_at = now
        self.size += len(piece)
        self.tail = piece[-_END_BYTES:] if len(piece) >= _END_BYTES else (self.tail + piece)[-_END_BYTES:]
        if self.is_stream:
            late_s = now - self._itl_s * self.tokens
            self.tokens += piece.count(b"data:")
            if late_s > self.late_s:
                self.late_s = late_s
        else:
            self.late_s = now

    def usage(self) -> tuple[int | None, int | None, int]:
        """Prompt and output tokens as the server reports them, and how many of the prompt's it reports as cached.

        Those that Anthropic's API reports as read from the cache are not among its prompt tokens.
        """
        ends = self.tail if self.size <= _END_BYTES else self.head + b"\n" + self.tail
        # Most of a response has no such key, and the search for a text is much faster than that for a pattern.
        first = ends.find(b'_tokens"')
        if first < 0:
            return None, None, 0
        begin = max(0, first - _LONGEST_KEY)
        prompt, output, cached = (pattern.findall(ends, begin) for pattern in _TOKEN_PATTERNS)
        return (
            int(prompt[-1]) if prompt else None,
            int(output[-1]) if output else None,
            min(int(cached[-1]), int(prompt[-1])) if prompt and cached else 0,
        )


class CallDescriber:
    """Makes ledger entries. `lanes` have the targets that attainment is measured against."""

    def __init__(self, salt: bytes, lanes: Mapping[Lane, LanePolicy]) -> None:
        self._salt = salt
        self._lanes = lanes

    def lane_of(self, headers: Mapping[bytes, bytes], body: bytes) -> tuple[Lane, _Body]:
        """The lane that the gateway would use, and the fields of the body that are read."""
        try:
            fields = msgspec.json.decode(body, type=_Body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            fields = _Body()
        named = headers.get(b"x-inferry-lane", b"").decode("latin-1").upper()
        if named in Lane.__members__:
            return Lane[named], fields
        return _TIERS.get(fields.service_tier or "", Lane.P1), fields

    def times(self, lane: Lane) -> ResponseTimes:
        return ResponseTimes((self._lanes[lane].itl_ms or 0.0) / 1000)

    def entry(
        self,
        job_id: str,
        headers: Mapping[bytes, bytes],
        lane: Lane,
        fields: _Body,
        times: ResponseTimes,
        *,
        status: int,
        is_aborted: bool,
        arrived_at: float,
        ended_at: float,
        wall: float,
        body_bytes: int,
    ) -> LedgerEntry:
        """The row of an ended call. `is_aborted`: the client disconnected before the end."""
        prompt, output, cached = times.usage()
        is_estimated = prompt is None or output is None
        if prompt is None:
            prompt = body_bytes // BYTES_PER_TOKEN
        if output is None:
            output = max(0, times.tokens - 1) if times.is_stream else times.size // BYTES_PER_TOKEN
        key = headers.get(b"authorization") or headers.get(b"x-api-key")
        named = fields.prompt_cache_key or fields.user or job_id
        session = headers.get(b"x-inferry-run-id") or named.encode()
        prefix, prompt_bytes = self._prefix(fields)
        late_s = None if times.first_at is None else times.late_s - arrived_at
        is_done = status < 400 and not is_aborted
        observed = ObservedFields(
            status=status,
            late_ms=None if late_s is None else round(late_s * 1000, 3),
            longest_gap_ms=round(times.longest_gap_s * 1000, 3),
            is_estimated=is_estimated,
            prompt_bytes=prompt_bytes,
            prefix=prefix,
        )
        return LedgerEntry(
            job_id=job_id,
            attempt=1,
            tenant="anonymous" if key is None else f"key-{self._hash(key)}",
            run_id=f"run-{self._hash(session)}",
            step_id="observed",
            model=fields.model or "unknown",
            lane=lane.name,
            outcome=Outcome.CANCELLED if is_aborted else Outcome.DONE if is_done else Outcome.FAILED,
            ended_at=wall,
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=cached,
            first_token_ms=None if times.first_at is None else (times.first_at - arrived_at) * 1000,
            total_ms=(ended_at - arrived_at) * 1000,
            worker=UPSTREAM,
            error_code=None if status < 400 else f"http_{status}",
            template_id=prefix[0] if prefix else None,
            attained=self._attained(lane, late_s, prompt - cached) if is_done else None,
            decision=msgspec.json.encode(Observed(observed)).decode(),
        )

    def _attained(self, lane: Lane, late_s: float | None, uncached_tokens: int) -> bool | None:
        policy = self._lanes[lane]
        if late_s is None or policy.ttft_ms is None:
            return None
        return late_s * 1000 <= policy.ttft_ms + policy.ttft_ms_per_1k_tokens * uncached_tokens / 1000

    def _prefix(self, fields: _Body) -> tuple[tuple[str, ...], int]:
        """Chained hashes of the beginning of the prompt, and the bytes of the whole prompt."""
        text = b"".join((fields.system, fields.messages, fields.prompt, fields.input))
        chain = hashlib.blake2b(fields.model.encode(), key=self._salt, digest_size=8)
        found = []
        for number in range(min(len(text) // SLICE_BYTES, MAX_SLICES)):
            chain.update(text[number * SLICE_BYTES : (number + 1) * SLICE_BYTES])
            found.append(chain.hexdigest())
        return tuple(found), len(text)

    def _hash(self, text: bytes) -> str:
        return hashlib.blake2b(text, key=self._salt, digest_size=8).hexdigest()
