"""The answer of a pooled job, as workers emit it and ingress reads it: one result per input, and the tokens used.

A vector is written as OpenAI's `base64` encoding: float32 values, little-endian. A score is a number. A classification
has the probability of every label.
"""

import base64
import binascii
import math
import sys
from array import array
from collections.abc import Sequence

import msgspec
from msgspec import Struct


class Classification(Struct, frozen=True):
    """`label`: the most probable one, None where it has no name. `probs`: of all labels, in the model's order."""

    label: str | None
    probs: list[float]


PooledResult = str | float | Classification


class PooledUsage(Struct, frozen=True):
    prompt_tokens: int = 0


class PooledAnswer(Struct):
    """`data` has vectors, scores or classifications, in the order of the inputs."""

    data: list[PooledResult]
    usage: PooledUsage = PooledUsage()


_answer_decoder = msgspec.json.Decoder(PooledAnswer)


def encode_answer(data: Sequence[PooledResult], prompt_tokens: int) -> bytes:
    return msgspec.json.encode({"data": data, "usage": {"prompt_tokens": prompt_tokens}})


def decode_answer(body: bytes) -> PooledAnswer:
    return _answer_decoder.decode(body)


def encode_vector(values: Sequence[float]) -> str:
    """Raises OverflowError or TypeError for values that are no float32 numbers."""
    return _to_text(array("f", values))


def encode_result(values: bytes, dimensions: int | None) -> str:
    """A vector of native float32 values; of `dimensions`, the first ones, normalised again."""
    vector = array("f", values)
    if dimensions is not None and dimensions < len(vector):
        vector = vector[:dimensions]
        length = math.sqrt(math.fsum(value * value for value in vector))
        vector = array("f", [value / length for value in vector]) if length else vector
    return _to_text(vector)


def classify(values: bytes, labels: Sequence[str]) -> Classification:
    """The probabilities as native float32 values, with the name of the highest."""
    probs = array("f", values).tolist()
    return Classification(labels[probs.index(max(probs))], probs)


def decode_vector(text: str) -> list[float]:
    """Raises ValueError."""
    return decode_array(text).tolist()


def decode_array(text: str) -> "array[float]":
    """Raises ValueError."""
    return read_array(binascii.a2b_base64(text, strict_mode=True))


def read_array(raw: bytes) -> "array[float]":
    """A vector of little-endian float32 values. Raises ValueError."""
    vector = array("f", raw)
    if sys.byteorder == "big":
        vector.byteswap()
    return vector


def cosine(a: bytes, b: bytes) -> float:
    """The cosine of two normalised vectors of native float32 values. Their lengths are rounded, so it is limited to
    its range.
    """
    product = math.fsum(x * y for x, y in zip(array("f", a), array("f", b), strict=True))
    return max(min(product, 1.0), -1.0)


def _to_text(vector: "array[float]") -> str:
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
