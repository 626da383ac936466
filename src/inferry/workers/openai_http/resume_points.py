"""Resume points at character boundaries.

A server under load joins several tokens into one event. The last token may be the first part of a character whose text
follows later, and the event does not show it. Detokenised, such ids end in the replacement character.
"""

from typing import Final

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.domain.jobs import InferenceJob
from inferry.workers.openai_http.profiles import Profile
from inferry.workers.openai_http.server_client import ServerClient
from inferry.workers.openai_http.settings import PromptText
from inferry.workers.resumed_stop_strings import COMPARED_CHARS, StopMatcher, resume_stop_matcher

CONTEXT_TOKENS: Final = 8
MAX_CHARACTER_BYTES: Final = 4
"""A UTF-8 character has at most four bytes, so at most three tokens of an incomplete one."""
TIMEOUT_S: Final = 10.0
"""Long, because a server under load responds late, and a guess may repeat or lose part of a character. Liveness probes
detect an unresponsive server."""
ATTEMPTS: Final = 3
"""Requests to a server that does not respond. Without the text, a stream with stop strings cannot be resumed."""
_REPLACEMENT: Final = "\ufffd"


class ResumePoints:
    """Finds resume points with a server's detokenize endpoint."""

    def __init__(self, client: ServerClient, path: bytes, headers: bytes) -> None:
        self._client = client
        self._path = path
        self._headers = headers

    @classmethod
    def of(cls, profile: Profile, client: ServerClient, headers: bytes) -> "ResumePoints | None":
        """None where servers of the profile do not detokenize."""
        return None if profile.detokenize_path is None else cls(client, profile.detokenize_path, headers)

    async def locate(self, job: InferenceJob) -> tuple[int, StopMatcher | None]:
        """The number of output ids to resume after, and a matcher for the job's stop strings from there on.

        The matcher is None where the job has none, or where the server does not detokenize.
        """
        resume_point, model, stop = job.resume_point, job.route.model, job.payload.sampling.stop
        assert resume_point is not None
        written = await self.complete_characters(model, resume_point.output_ids)
        if not stop:
            return written, None
        chars = max(map(len, stop)) + COMPARED_CHARS
        if resume_point.tail == "":
            chars = max(chars, written)  # no text was delivered, so all of it is needed
        text = await self.text_tail(model, resume_point.prompt_ids, resume_point.output_ids[:written], chars)
        return written, None if text is None else resume_stop_matcher(job, resume_point, text)

    async def complete_characters(self, model: str, ids: tuple[int, ...]) -> int:
        """The number of leading ids up to a character boundary; all of them where the server does not detokenize."""
        for skipped in range(min(MAX_CHARACTER_BYTES, len(ids) + 1)):
            length = len(ids) - skipped
            if not length:
                return 0
            text = await self._detokenize(model, ids[max(0, length - CONTEXT_TOKENS) : length])
            if text is None:
                break
            if not text.endswith(_REPLACEMENT):
                return length
        return len(ids)

    async def text_tail(
        self, model: str, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...], chars: int
    ) -> str | None:
        """The last `chars` characters of an output, or all of them; None where the server does not detokenize.

        The text of an id may depend on the ids before it, so some of these are detokenised too.
        """
        count = chars
        while count < len(output_ids):
            text = await self._detokenize(model, output_ids[-count:])
            if text is None:
                return None
            if len(text) >= chars + CONTEXT_TOKENS:
                return text[-chars:]
            count *= 2
        before = prompt_ids[-CONTEXT_TOKENS:]
        prefix_text = await self._detokenize(model, before)
        full_text = await self._detokenize(model, before + output_ids)
        if prefix_text is None or full_text is None or not full_text.startswith(prefix_text):
            return None
        return full_text[len(prefix_text) :]

    async def _detokenize(self, model: str, ids: tuple[int, ...]) -> str | None:
        body = msgspec.json.encode({"model": model, "tokens": ids})
        for _ in range(ATTEMPTS):
            try:
                status, response = await self._client.post(self._path, self._headers, body, TIMEOUT_S)
                return msgspec.json.decode(response, type=PromptText).prompt if status == 200 else None
            except WorkerLost:
                continue
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break
        return None
