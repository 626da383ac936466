"""Ranking by the cosine of vectors: with numpy where it is installed, otherwise in plain Python."""

import math
from array import array
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from operator import mul
from typing import Any

from inferry.domain.errors import InvalidRequest

# It comes with `inferry[engine]`.
numpy: Any = import_module("numpy") if find_spec("numpy") else None


class VectorIndex:
    """Vectors of one length, normalised once. Raises InvalidRequest where their lengths differ."""

    def __init__(self, vectors: "Sequence[array[float]]") -> None:
        self.dimensions = len(vectors[0]) if vectors else 0
        if len(set(map(len, vectors))) > 1:
            raise InvalidRequest("the vectors differ in length")
        self._rows: Any = []
        if numpy is None:
            self._rows = [_normalised(vector) for vector in vectors]
        elif vectors:
            rows = numpy.frombuffer(b"".join(vectors), dtype=numpy.float32).reshape(len(vectors), self.dimensions)
            self._rows = _unit_rows(rows)

    def __len__(self) -> int:
        return len(self._rows)

    def rank(self, query: "array[float]", top: int | None) -> list[tuple[int, float]]:
        """Index and cosine of the nearest vectors, the nearest first; of equal ones, the first of the list."""
        if not len(self):
            return []
        if len(query) != self.dimensions:
            raise InvalidRequest(f"the query has {len(query)} dimensions, and the vectors have {self.dimensions}")
        if numpy is not None:
            scores = self._rows @ _unit_rows(numpy.frombuffer(query, dtype=numpy.float32).reshape(1, -1))[0]
            order = numpy.argsort(-scores, kind="stable")[:top]
            return [(int(index), _in_range(float(scores[index]))) for index in order]
        one = _normalised(query)
        found = [_in_range(sum(map(mul, row, one))) for row in self._rows]
        return [(index, found[index]) for index in sorted(range(len(found)), key=lambda index: -found[index])[:top]]


def _in_range(cosine: float) -> float:
    """Lengths are rounded, so the product of two vectors may be just above 1."""
    return max(min(cosine, 1.0), -1.0)


def _unit_rows(rows: Any) -> Any:
    lengths = numpy.sqrt(numpy.einsum("ij,ij->i", rows, rows, dtype=numpy.float64))[:, None]
    return (rows / numpy.where(lengths == 0, 1, lengths)).astype(numpy.float32)


def _normalised(vector: "array[float]") -> "array[float]":
    length = math.sqrt(sum(map(mul, vector, vector)))
    return array("f", [value / length for value in vector]) if length else vector
