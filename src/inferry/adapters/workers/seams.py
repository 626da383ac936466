"""Where a stream can be taken up again: after a whole character.

A server that has fallen behind joins several tokens into one event. The last of them may be the first half of a
character, whose text is still to come, and nothing in the event says so. Detokenised, such ids end in the character
that stands for what cannot be read.
"""

import msgspec

from inferry.adapters.workers.questions import Questions
from inferry.adapters.workers.values import PromptText
from inferry.domain.errors import WorkerLost

LOOKED_AT = 8
LONGEST_CHARACTER = 4
"""A character has at most four bytes, so no more than three tokens of it can have come without the last."""
TIMEOUT_S = 10.0
"""Long, because a guess may repeat or lose half a character: a server under load answers late. One that is silent is
noticed elsewhere."""
_UNREADABLE = "\ufffd"


class Seams:
    """Asks a server how its tokens read."""

    def __init__(self, questions: Questions, path: bytes, headers: bytes) -> None:
        self._questions = questions
        self._path = path
        self._headers = headers

    async def whole_characters(self, model: str, ids: tuple[int, ...]) -> int:
        """How many of the ids are whole characters. All of them, where the server does not say."""
        for dropped in range(min(LONGEST_CHARACTER, len(ids) + 1)):
            kept = len(ids) - dropped
            if not kept:
                return 0
            text = await self._text(model, ids[max(0, kept - LOOKED_AT) : kept])
            if text is None:
                break
            if not text.endswith(_UNREADABLE):
                return kept
        return len(ids)

    async def end_of_text(
        self, model: str, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...], chars: int
    ) -> str | None:
        """The last characters of the text of an output, `chars` or all of them; None where the server does not say.

        How the first ids of a text read may differ from how they read within it, so some before them are read too.
        """
        count = chars
        while count < len(output_ids):
            text = await self._text(model, output_ids[-count:])
            if text is None:
                return None
            if len(text) >= chars + LOOKED_AT:
                return text[-chars:]
            count *= 2
        before = prompt_ids[-LOOKED_AT:]
        opening = await self._text(model, before)
        whole = await self._text(model, before + output_ids)
        if opening is None or whole is None or not whole.startswith(opening):
            return None
        return whole[len(opening) :]

    async def _text(self, model: str, ids: tuple[int, ...]) -> str | None:
        body = msgspec.json.encode({"model": model, "tokens": ids})
        try:
            status, answer = await self._questions.post(self._path, self._headers, body, TIMEOUT_S)
            return msgspec.json.decode(answer, type=PromptText).prompt if status == 200 else None
        except (WorkerLost, msgspec.MsgspecError, UnicodeDecodeError):
            return None
