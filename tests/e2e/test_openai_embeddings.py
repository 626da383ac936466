"""Embeddings by the official client, against the embedded engine."""

import asyncio
import math
import warnings
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from inferry.domain.workers import Phase
from inferry.engine.tokenizer import HfTokenizer
from support.pooling_models import embedding_model, scoring_model
from support.serving import Serving, get, post
from support.waiting import async_until

TEXTS = ["the scheduler", "a queue of jobs", "the scheduler plans jobs", "é 日"]


def client(gateway: Serving) -> OpenAI:
    return OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0)


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_an_embedding_is_a_unit_vector_with_its_tokens(real: Serving) -> None:
    with client(real) as api:
        answer = api.embeddings.create(model="tiny", input=TEXTS[0])
    (one,) = answer.data
    assert math.isclose(cosine(one.embedding, one.embedding), 1, rel_tol=1e-5)
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


def test_floats_and_base64_are_the_same_numbers(real: Serving) -> None:
    with client(real) as api:
        encoded = api.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
        plain = api.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [one.index for one in plain.data] == [0, 1, 2, 3]
    for a, b in zip(encoded.data, plain.data, strict=True):
        assert list(a.embedding) == pytest.approx(b.embedding)
    assert encoded.usage == plain.usage


def test_token_ids_give_the_vector_of_their_text(real: Serving, tiny_model: Path) -> None:
    ids = [HfTokenizer(tiny_model).encode(text) for text in TEXTS]
    with client(real) as api:
        texts = api.embeddings.create(model="tiny", input=TEXTS)
        lists = api.embeddings.create(model="tiny", input=ids)
        alone = api.embeddings.create(model="tiny", input=ids[1])
    assert [one.embedding for one in texts.data] == [pytest.approx(one.embedding, abs=1e-5) for one in lists.data]
    assert alone.data[0].embedding == pytest.approx(texts.data[1].embedding, abs=1e-5)
    assert lists.usage.prompt_tokens == sum(map(len, ids))


def test_many_calls_at_once_get_their_own_vectors(real: Serving) -> None:
    texts = [f"text number {number}" for number in range(100)]

    async def scenario() -> list[Any]:
        async with AsyncOpenAI(base_url=real.url + "/v1", api_key="unused", max_retries=0) as api:
            calls = [api.embeddings.create(model="tiny", input=text) for text in texts]
            return list(await asyncio.gather(*calls))

    answers = asyncio.run(scenario())
    with client(real) as api:
        together = api.embeddings.create(model="tiny", input=texts)
    for answer, expected in zip(answers, together.data, strict=True):
        assert answer.data[0].embedding == pytest.approx(expected.embedding, abs=1e-5)
    assert sum(answer.usage.prompt_tokens for answer in answers) == together.usage.prompt_tokens


def test_an_input_longer_than_the_context_is_refused_by_its_index(real: Serving) -> None:
    with client(real) as api, pytest.raises(openai.BadRequestError) as refused:
        api.embeddings.create(model="tiny", input=["short", "long " * 20_000])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input[1]")
    with client(real) as api:
        cut = api.embeddings.create(model="tiny", input=["long " * 20_000], extra_body={"truncate_prompt_tokens": 8})
    assert cut.usage.prompt_tokens == 8


def test_dimensions_need_a_model_that_has_them(real: Serving) -> None:
    with client(real) as api, pytest.raises(openai.BadRequestError) as refused:
        api.embeddings.create(model="tiny", input="a", dimensions=8)
    assert (refused.value.code, refused.value.param) == ("unsupported_feature", "dimensions")


def test_scores_of_a_model_without_a_head_are_cosines(real: Serving) -> None:
    with client(real) as api:
        a, b = (one.embedding for one in api.embeddings.create(model="tiny", input=TEXTS[:2]).data)
    status, _, scored = post(real.url, "/v1/score", {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS[:2]})
    assert status == 200
    assert [one["score"] for one in scored["data"]] == pytest.approx([1, cosine(a, b)], abs=1e-5)
    call = {"model": "tiny", "query": TEXTS[0], "documents": TEXTS, "top_n": 2}
    status, _, ranked = post(real.url, "/v1/rerank", call)
    assert status == 200
    assert ranked["results"][0]["index"] == 0
    assert len(ranked["results"]) == 2
    assert ranked["results"][0]["document"] == {"text": TEXTS[0]}


async def until_both_are_ready(gateway: Serving) -> None:
    await async_until(lambda: all(view.phase is Phase.READY for view in gateway.service.gateway.views()))


def test_pooling_models_of_the_embedded_engine(tmp_path: Path) -> None:
    embeds = embedding_model(tmp_path / "embeds")
    config = embeds / "config.json"
    config.write_text(config.read_text().replace("{", '{"is_matryoshka": true,', 1))
    scores = scoring_model(tmp_path / "scores")
    labels = scoring_model(tmp_path / "labels", labels=3, id2label={"0": "bug", "1": "praise", "2": "question"})
    workers = [{"kind": "embedded", "name": one.name, "model": str(one)} for one in (embeds, scores, labels)]
    with Serving(tmp_path, config={"workers": workers}) as gateway:
        gateway.run(until_both_are_ready(gateway))
        models = {one["id"]: one["tasks"] for one in get(gateway.url, "/v1/models")[2]["data"]}
        assert models == {"embeds": ["embed", "score"], "scores": ["score"], "labels": ["classify"]}
        with client(gateway) as api:
            whole = api.embeddings.create(model="embeds", input=TEXTS[0]).data[0].embedding
            short = api.embeddings.create(model="embeds", input=TEXTS[0], dimensions=16).data[0].embedding
            length = math.sqrt(cosine(whole[:16], whole[:16]))
            assert short == pytest.approx([value / length for value in whole[:16]], abs=1e-5)
            with pytest.raises(openai.BadRequestError, match="does not support the task `generate`"):
                api.completions.create(model="embeds", prompt="hi")
            with pytest.raises(openai.BadRequestError, match="does not support the task `embed`"):
                api.embeddings.create(model="scores", input="hi")
        call = {"model": "scores", "query": "q", "documents": TEXTS}
        status, _, ranked = post(gateway.url, "/v1/rerank", call)
        assert status == 200
        found = [one["relevance_score"] for one in ranked["results"]]
        assert found == sorted(found, reverse=True)
        assert all(0 < one < 1 for one in found)
        assert len(set(found)) == len(TEXTS)
        check_classifications(gateway, labels)


def check_classifications(gateway: Serving, model_dir: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(model_dir)
    ids = [HfTokenizer(model_dir).encode(text) for text in TEXTS]
    for given in (TEXTS, ids):
        status, _, answer = post(gateway.url, "/v1/classify", {"model": "labels", "input": given})
        assert status == 200
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        for one, tokens in zip(answer["data"], ids, strict=True):
            with torch.inference_mode():
                expected = torch.softmax(model(torch.tensor([tokens])).logits[0], 0)
            assert one["probs"] == pytest.approx(expected.tolist(), abs=2e-5)
            assert one["label"] == ("bug", "praise", "question")[int(expected.argmax())]
            assert one["num_classes"] == 3
    logits = {"model": "labels", "input": "a", "use_activation": False}
    for call, param in (({"model": "scores", "input": "a"}, "model"), (logits, "use_activation")):
        status, _, refused = post(gateway.url, "/v1/classify", call)
        error = refused["error"]
        assert (status, error["code"], error["param"]) == (400, "unsupported_feature", param)
