"""Requests for several pooled jobs, and the results in their responses.

The body of a pooled job is canonical (`ingress.pooling`): `input`, or `text_1` and `text_2`, are lists.
"""

import msgspec
from msgspec import Raw, Struct

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, PooledInputs
from inferry.domain.pooling import decode_array, encode_vector
from inferry.domain.values import replace
from inferry.workers.openai_http.chunk_schema import ReportedUsage

_LISTS = {"embeddings": ("input",), "score": ("text_1", "text_2")}
"""The fields with inputs, by API."""
_fields_decoder = msgspec.json.Decoder(dict[str, Raw])
_items_decoder = msgspec.json.Decoder(list[Raw])


class _Result(Struct):
    index: int = 0
    embedding: list[float] | str | None = None
    score: float | None = None


class _Response(Struct):
    data: list[_Result]
    usage: ReportedUsage | None = None


_response_decoder = msgspec.json.Decoder(_Response)


def combined_job(name: str, parts: list[tuple[InferenceJob, int, int]]) -> tuple[InferenceJob, list[int]]:
    """A job for the request of several jobs, each with its inputs from `start` to `stop`, and the size of each part:
    its bytes of text, or its token ids.
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
            own = own if len(own) == 1 else own[start:stop]
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


def is_one_to_many(job: InferenceJob) -> bool:
    """Whether one text is compared with several: such a request cannot hold the pairs of another job."""
    if job.payload.api != "score":
        return False
    fields = _fields_decoder.decode(job.payload.body)
    return len(_items_decoder.decode(fields["text_1"])) != len(_items_decoder.decode(fields["text_2"]))


def read_results(body: bytes, count: int) -> tuple[list[str | float], int] | None:
    """The results of a response in the order of its inputs, and its prompt tokens; None where it is malformed."""
    try:
        response = _response_decoder.decode(body)
        data = sorted(response.data, key=lambda result: result.index)
        if [result.index for result in data] != list(range(count)):
            return None
        results = [_result(result) for result in data]
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, OverflowError):
        return None
    return results, 0 if response.usage is None else max(0, response.usage.prompt_tokens)


def _result(result: _Result) -> str | float:
    if result.score is not None:
        return result.score
    if isinstance(result.embedding, str):
        decode_array(result.embedding)
        return result.embedding
    if result.embedding is None:
        raise ValueError("neither a vector nor a score")
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
