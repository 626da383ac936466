"""Values of stages: vectors of an answer, and ranking them with numpy and without."""

import math
import random
from array import array

import msgspec
import pytest

from inferry.domain.errors import InvalidRequest, WorkerLost
from inferry.domain.pooling import cosine, encode_vector
from inferry.pipelines import similarity
from inferry.pipelines.similarity import VectorIndex
from inferry.pipelines.stage_calls import Usage, read_vectors


def an_answer(*embeddings: str) -> bytes:
    usage = {"prompt_tokens": 3, "total_tokens": 3}
    return msgspec.json.encode({"data": [{"embedding": one} for one in embeddings], "usage": usage})


def test_the_vectors_of_an_answer_are_read_from_base64() -> None:
    vectors, usage = read_vectors(an_answer(encode_vector([0.5, -1.0]), encode_vector([2.0, 0.0])))
    assert [vector.tolist() for vector in vectors] == [[0.5, -1.0], [2.0, 0.0]]
    assert usage == Usage(prompt_tokens=3, total_tokens=3)


@pytest.mark.parametrize("text", ["AAAA", "no base64!", "AAAAAA"])
def test_a_vector_that_is_malformed_is_the_workers_fault(text: str) -> None:
    with pytest.raises(WorkerLost):
        read_vectors(an_answer(text))


def some_vectors(count: int, dimensions: int) -> "list[array[float]]":
    rng = random.Random(1)
    return [array("f", [rng.gauss(0, 1) for _ in range(dimensions)]) for _ in range(count)]


def test_numpy_and_plain_python_rank_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    query, *vectors = some_vectors(40, 32)
    vectors.append(array("f", [0.0] * 32))
    with_numpy = VectorIndex(vectors).rank(query, None)
    monkeypatch.setattr(similarity, "numpy", None)
    plain = VectorIndex(vectors).rank(query, None)
    assert [index for index, _ in with_numpy] == [index for index, _ in plain]
    assert all(math.isclose(a, b, abs_tol=1e-5) for (_, a), (_, b) in zip(with_numpy, plain, strict=True))
    assert dict(plain)[39] == 0.0, "a vector without a direction"


@pytest.mark.parametrize("with_numpy", [True, False])
def test_a_cosine_is_never_above_one(monkeypatch: pytest.MonkeyPatch, with_numpy: bool) -> None:
    if not with_numpy:
        monkeypatch.setattr(similarity, "numpy", None)
    vectors = some_vectors(200, 8)
    best = [VectorIndex([vector]).rank(vector, 1)[0][1] for vector in vectors]
    assert max(best) == 1.0
    assert min(best) > 0.999
    norms = [math.sqrt(sum(x * x for x in vector)) for vector in vectors]
    units = [array("f", [x / norm for x in vector]).tobytes() for vector, norm in zip(vectors, norms, strict=True)]
    opposite = [array("f", [-x for x in array("f", unit)]).tobytes() for unit in units]
    assert max(cosine(unit, unit) for unit in units) == 1.0
    assert min(map(cosine, units, opposite)) == -1.0


def test_vectors_that_differ_in_length_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="differ in length"):
        VectorIndex([array("f", [1.0]), array("f", [1.0, 2.0])])
    with pytest.raises(InvalidRequest, match="1 dimensions"):
        VectorIndex(some_vectors(2, 2)).rank(array("f", [1.0]), None)
