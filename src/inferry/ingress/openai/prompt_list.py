"""The prompts of one completions call, each as a request of its own."""

import re
from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import Raw

from inferry.domain.errors import BodyTooLarge, InvalidRequest
from inferry.ingress.openai.request_schema import CompletionRequest
from inferry.ingress.wire_format import OPENAI, ClientRequest

_fields_decoder: Final = msgspec.json.Decoder(dict[str, Raw])
_SEVERAL: Final = re.compile(rb'\s*\[\s*["\[]')
# One element of a list that is known to be valid JSON: a string, or a list of numbers.
_ELEMENT: Final = re.compile(rb'\s*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|\[[^\[\]"{]*+\])\s*+([,\]])')


class PromptList:
    """Two or more prompts and the fields that they share."""

    def __init__(self, wire: CompletionRequest, shared_fields: bytes, prompts: list[bytes]) -> None:
        self._wire = wire
        self._shared_fields = shared_fields
        self._prompts = prompts
        self.total_bytes = sum([len(prompt) for prompt in prompts]) + len(prompts) * len(shared_fields)

    def __len__(self) -> int:
        return len(self._prompts)

    def requests(self) -> Iterator[ClientRequest]:
        """One request per prompt. Bodies are made one at a time."""
        for prompt in self._prompts:
            body = b'%b,"prompt":%b}' % (self._shared_fields, prompt)
            yield ClientRequest(msgspec.structs.replace(self._wire, prompt=Raw(prompt)), body, OPENAI)


def read_prompt_list(wire: CompletionRequest, body: bytes, max_prompts: int, max_bytes: int) -> PromptList | None:
    """The prompts of a request that has several; None for a request with one."""
    if memoryview(wire.prompt)[0] == 0x22 or _SEVERAL.match(wire.prompt) is None:  # 0x22: text
        return None
    prompts = _split(bytes(wire.prompt), max_prompts)
    if len(prompts) == 1:
        return None
    fields = _fields_decoder.decode(body)
    del fields["prompt"]
    shared_fields = msgspec.json.encode(fields)[:-1]
    # Every prompt is sent with a copy of the shared fields.
    if len(prompts) * len(shared_fields) > max_bytes:
        raise BodyTooLarge(
            f"{len(prompts)} prompts with {len(shared_fields)} bytes of other fields each exceed {max_bytes} bytes"
        )
    return PromptList(wire, shared_fields, prompts)


def _split(raw: bytes, max_prompts: int) -> list[bytes]:
    """The elements of a JSON list. Stops at the limit, so that a list of millions of elements costs nothing."""
    found: list[bytes] = []
    at = raw.index(b"[") + 1
    while True:
        element = _ELEMENT.match(raw, at)
        if element is None:
            raise InvalidRequest(
                f"`prompt[{len(found)}]` must be text or a list of token ids", param=f"prompt[{len(found)}]"
            )
        if len(found) == max_prompts:
            raise InvalidRequest(f"`prompt` has more than {max_prompts} prompts", param="prompt")
        found.append(element[1])
        if element[2] == b"]":
            return found
        at = element.end()
