"""Where a stream can be taken up again: after a whole character.

A server that has fallen behind joins several tokens into one event. The last of them may be the first half of a
character, whose text is still to come, and nothing in the event says so. Detokenised, such ids end in the character
that stands for what cannot be read.
"""

import msgspec

from inferry.domain.errors import WorkerLost
from inferry.workers.openai_http.server_client import ServerClient
from inferry.workers.openai_http.settings import PromptText

CONTEXT_TOKENS = 8
MAX_CHARACTER_BYTES = 4
"""A character has at most four bytes, so no more than three tokens of it can have come without the last."""
TIMEOUT_S = 10.0
"""Long, because a guess may repeat or lose half a character: a server under load answers late. One that is silent is
noticed elsewhere."""
_REPLACEMENT = "\ufffd"


class ResumePoints:
    """Asks a server how its tokens read."""

    def __init__(self, client: ServerClient, path: bytes, headers: bytes) -> None:
        self._client = client
        self._path = path
        self._headers = headers

    async def complete_characters(self, model: str, ids: tuple[int, ...]) -> int:
        """How many of the ids are whole characters. All of them, where the server does not say."""
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
        """The last characters of the text of an output, `chars` or all of them; None where the server does not say.

        How the first ids of a text read may differ from how they read within it, so some before them are read too.
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
        try:
            status, response = await self._client.post(self._path, self._headers, body, TIMEOUT_S)
            return msgspec.json.decode(response, type=PromptText).prompt if status == 200 else None
        except (WorkerLost, msgspec.MsgspecError, UnicodeDecodeError):
            return None
