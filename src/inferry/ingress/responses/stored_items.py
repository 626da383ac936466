"""Items of stored responses: those that a request refers to, and those that it adds.

Ids of items contain the id of their response, so an item is found by its id alone: `msg_<response>_<number>` in the
output, `msg_<response>_i<number>` in the input.
"""

import re
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct

from inferry.domain.errors import InvalidRequest, NotFound
from inferry.durable.responses import UNFINISHED, StoredResponse, StoredResponses
from inferry.ingress.errors import printable
from inferry.ingress.responses.decode import decode_items
from inferry.ingress.responses.request_schema import InputItem
from inferry.ingress.responses.response_object import ID_PREFIX

_encode = msgspec.json.encode
_raws_decoder = msgspec.json.Decoder(list[Raw])
_ITEM_ID = re.compile(r"[a-z]+_(.+)_i?\d+")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


class _ItemId(Struct):
    id: str = ""


class _ItemEnd(Struct):
    type: str | None = None
    status: Any = None


_id_decoder = msgspec.json.Decoder(_ItemId)
_end_decoder = msgspec.json.Decoder(_ItemEnd)


def id_of(item: Raw) -> str:
    return _id_decoder.decode(item).id


def is_reference(item: InputItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


async def find_item(responses: StoredResponses, tenant: str, id: str, path: str) -> Raw:
    """A stored item of the tenant. Raises NotFound."""
    found = _ITEM_ID.fullmatch(id)
    if found is not None:
        try:
            stored = await responses.get(tenant, ID_PREFIX + found[1])
        except NotFound:
            pass
        else:
            for item in (*stored.state.output, *stored.input):
                if id_of(item) == id:
                    return item
    raise NotFound(f"Item with id '{printable(id)}' not found.", param=path)


def history_of(chain: list[StoredResponse]) -> list[InputItem]:
    """The items of earlier responses, in order, without function calls that were cut off: their arguments are not JSON,
    which chat templates need. Raises InvalidRequest where the last one has not ended.
    """
    return decode_items(b"[%b]" % b",".join(bytes(item) for item in context_of(chain) if not _is_cut_off_call(item)))


def _is_cut_off_call(item: Raw) -> bool:
    end = _end_decoder.decode(item)
    return end.type == "function_call" and end.status == "incomplete"


def context_of(chain: list[StoredResponse]) -> list[Raw]:
    items: list[Raw] = []
    for stored in chain:
        state = stored.state
        if state.status in UNFINISHED:
            raise InvalidRequest("`previous_response_id`: the response has not ended", param="previous_response_id")
        items += [*stored.input, *state.output]
    return items


def input_items(raw: Raw, response_id: str, found: dict[int, Raw]) -> list[Raw]:
    """The items of a request, each with a type and an id. `found` replaces references."""
    base = response_id.removeprefix(ID_PREFIX)
    items = decode_items(raw)
    raws = [raw] if len(items) == 1 and bytes(raw).startswith(b'"') else _raws_decoder.decode(raw)
    return [
        found.get(index) or _with_id(item, one, f"{base}_i{index}")
        for index, (item, one) in enumerate(zip(items, raws, strict=True))
    ]


def _with_id(item: InputItem, raw: Raw, number: str) -> Raw:
    kind = item.type or "message"
    id = item.id or f"{_PREFIXES.get(kind, 'item')}_{number}"
    content = item.content
    if kind == "message" and content is not UNSET and bytes(content).startswith(b'"'):
        part = b"output_text" if item.role == "assistant" else b"input_text"
        more = b',"annotations":[]' if item.role == "assistant" else b""
        return Raw(
            b'{"id":%b,"type":"message","status":"completed","role":%b,"content":[{"type":"%b","text":%b%b}]}'
            % (_encode(id), _encode(item.role), part, bytes(content), more)
        )
    head = b"" if item.id else b'"id":%b,' % _encode(id)
    head += b"" if item.type else b'"type":"message",'
    return Raw(b"{" + head + bytes(raw)[1:])
