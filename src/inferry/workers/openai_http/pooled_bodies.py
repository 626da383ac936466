"""Requests for several pooled jobs, and the results in their responses.

The body of a pooled job is canonical (`ingress.pooling`): `input`, or `text_1` and `text_2`, are lists.
"""

from typing import Any

import msgspec
from msgspec import Raw, Struct

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, PooledInputs
from inferry.domain.pooling import Classification, PooledResult, decode_array, encode_vector
from inferry.domain.values import replace

_LISTS = {"embeddings": ("input",), "classify": ("input",), "score": ("text_1", "text_2")}
"""The fields with inputs, by API."""
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_items_decoder = msgspec.json.Decoder(list[Raw])


class _Result(Struct):
    index: int = 0
    embedding: list[float] | str | None = None
    score: float | None = None
    label: str | None = None
    probs: list[float] | None = None


class _Response(Struct):
    data: list[_Result]
    usage: Any = None


_response_decoder = msgspec.json.Decoder(_Response)


def combined_job(name: str, parts: list[tuple[InferenceJob, int, int]]) -> tuple[InferenceJob, list[int]]:
    """A job for the request of several jobs, each with its inputs from `start` to `stop`, and the size of each part:
    its bytes of text, or its token ids.

    Beside other jobs, one text that is compared with several is repeated for each of them.
    """
    first = parts[0][0]
    payload = first.payload
    fields = _fields_decoder.decode(payload.body)
    lists: dict[str, list[Raw]] = {field: [] for field in _LISTS[payload.api]}
    prompt = 0
    sizes: list[int] = []
    for job, start, stop in parts:
        sizes.append(0)
        own_fields = fields if job is first else _fields_decoder.decode(job.payload.body)
        for field, items in lists.items():
            own = _items_decoder.decode(own_fields[field])
            if len(own) > 1:
                own = own[start:stop]
            elif len(parts) > 1:
                own *= stop - start
            items.extend(own)
            sizes[-1] += sum(map(_size, own))
        prompt += job.footprint.prompt.expected
    if len(parts) > 1:
        fields.pop("user", None)
    fields.update({field: Raw(msgspec.json.encode(items)) for field, items in lists.items()})
    if payload.api == "embeddings":
        fields["encoding_format"] = Raw(b'"base64"')
    count = sum(stop - start for _, start, stop in parts)
    none = Estimate.exactly(0)
    combined = replace(
        first,
        job_id=name,
        footprint=Footprint(Estimate.exactly(prompt), none, none),
        payload=replace(payload, body=msgspec.json.encode(fields), pooled=PooledInputs(count)),
    )
    return combined, sizes


def _size(item: Raw) -> int:
    encoded = bytes(item)
    return encoded.count(b",") + 1 if encoded.startswith(b"[") else len(encoded) - 2


def repeated_bytes(job: InferenceJob) -> int:
    """What one text that is compared with several adds to a request that repeats it for each of them."""
    if job.payload.api != "score":
        return 0
    first = _items_decoder.decode(_fields_decoder.decode(job.payload.body)["text_1"])
    assert job.payload.pooled is not None
    return len(bytes(first[0])) * (job.payload.pooled.count - len(first))


def read_results(body: bytes, count: int) -> tuple[list[PooledResult], int] | None:
    """The results of a response in the order of its inputs, and its prompt tokens; None where it is malformed."""
    try:
        response = _response_decoder.decode(body)
        data = sorted(response.data, key=lambda result: result.index)
        if [result.index for result in data] != list(range(count)):
            return None
        results = [_result(result) for result in data]
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError):
        return None
    return results, _prompt_tokens(response.usage)


def _prompt_tokens(usage: object) -> int:
    """What the server has counted. A malformed count is a missing one."""
    tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return max(0, tokens) if type(tokens) is int else 0


def _result(result: _Result) -> PooledResult:
    if result.score is not None:
        return result.score
    if result.probs:
        return Classification(result.label, result.probs)
    if isinstance(result.embedding, str):
        decode_array(result.embedding)
        return result.embedding
    if result.embedding is None:
        raise ValueError("no result")
    return encode_vector(result.embedding)


def split_tokens(total: int, sizes: list[int]) -> list[int]:
    """`total` divided in proportion to the sizes; the sum is `total`."""
    shares: list[int] = []
    given = passed = 0
    weights = [max(1, size) for size in sizes]
    whole = sum(weights)
    for weight in weights:
        passed += weight
        until = round(total * passed / whole)
        shares.append(until - given)
        given = until
    return shares
