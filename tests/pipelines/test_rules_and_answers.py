"""The pure parts of routes, cascades and ensembles."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from inferry.pipelines import votes
from inferry.pipelines.answers import agree, logprobs_of, meaning, schema_problem
from inferry.pipelines.cascades import Verdict, judge, may_escalate
from inferry.pipelines.routes import match_label
from inferry.pipelines.rules import Condition, Rule, choose, hash_system_prompt, last_user_content, read_facts
from inferry.pipelines.settings import AcceptConfig


def fields(**values: Any) -> dict[str, Raw]:
    return {name: Raw(msgspec.json.encode(value)) for name, value in values.items()}


def body(text: str, *logprobs: float, **message: Any) -> dict[str, Any]:
    found = {"content": [{"logprob": value} for value in logprobs]} if logprobs else None
    return {"choices": [{"message": {"content": text, **message}, "logprobs": found, "finish_reason": "stop"}]}


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("when", "is_met"),
    [
        (Condition(), True),
        (Condition(max_prompt_bytes=5), False),
        (Condition(min_prompt_bytes=5, max_prompt_bytes=500), True),
        (Condition(templates=("t1",)), True),
        (Condition(templates=("t2",)), False),
        (Condition(system_hashes=(hash_system_prompt("Be brief."),)), True),
        (Condition(system_hashes=(hash_system_prompt("Be long."),)), False),
        (Condition(tenants=("acme", "other")), True),
        (Condition(tenants=("other",)), False),
        (Condition(tools=False), True),
        (Condition(tools=True), False),
        (Condition(lanes=("P0",)), False),
        (Condition(headers={"x-team": "search"}), True),
        (Condition(headers={"x-team": "ads"}), False),
        (Condition(tenants=("acme",), tools=True), False),
    ],
)
def test_a_rule_applies_where_all_its_conditions_hold(when: Condition, is_met: bool) -> None:
    headers = {b"x-inferry-template-id": b"t1", b"x-team": b"search"}
    facts = read_facts(fields(messages=MESSAGES, tools=[]), headers, "acme", "P1")
    assert choose([Rule(when=when, model="m")], facts) == ("m" if is_met else None)


def test_the_first_rule_that_applies_wins() -> None:
    rules = [Rule(when=Condition(tools=True), model="a"), Rule(when=Condition(), model="b")]
    rules.append(Rule(when=Condition(), model="c"))
    assert choose(rules, read_facts(fields(prompt="x"), {}, "t", "P1")) == "b"


def test_a_classifier_reads_the_last_message_of_the_user() -> None:
    assert last_user_content(fields(messages=[*MESSAGES, {"role": "assistant", "content": "a"}])) == "Hi"
    assert last_user_content(fields(prompt="text")) == "text"
    assert last_user_content(fields(prompt=[1, 2])) is None


def test_a_label_is_found_at_the_begin_and_the_longest_wins() -> None:
    labels = {"hard": "large", "hardware": "expert"}
    assert match_label(' "Hardware."', labels) == "expert"
    assert match_label("hard", labels) == "large"
    assert match_label("it is hard", labels) is None


def test_answers_agree_by_meaning() -> None:
    assert agree(body("The  answer."), body("the answer"))
    assert agree(body('{"a": 1, "b": [true]}'), body('{"b":[true],"a":1}'))
    assert not agree(body('{"a": true}'), body('{"a": 1}'))
    assert not agree(body("yes"), body("no"))
    call = [{"function": {"name": "f", "arguments": '{"x": 1}'}}]
    same = [{"function": {"name": "f", "arguments": '{"x":1}'}}]
    assert agree(body("", tool_calls=call), body("", tool_calls=same))
    assert isinstance(meaning(body("{broken")["choices"][0]), str)


def test_a_verdict_names_what_was_unsure() -> None:
    accept = AcceptConfig(min_mean_logprob=-0.5, min_token_logprob=-2.0)
    sure = judge(accept, {}, body("a", -0.1, -0.3))
    assert (sure.accepted, sure.reason) == (True, "accepted")
    assert sure.score == pytest.approx(-0.2)
    assert judge(accept, {}, body("a", -1.0)).reason == "mean_logprob"
    assert judge(accept, {}, body("a", -2.1, *[-0.01] * 20)).reason == "token_logprob"
    assert judge(accept, {}, body("a")) == Verdict(False, "no_logprobs")
    assert judge(AcceptConfig(), {}, body("a")).accepted
    completions = {"choices": [{"text": "a", "logprobs": {"token_logprobs": [None, -0.5]}}]}
    assert logprobs_of(completions) == [-0.5]


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "kind": {"enum": ["a", "b"]}, "list": {"items": {"type": "string"}}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "is_fine"),
    [
        ('{"n": 1}', True),
        ('{"n": 1, "kind": "a", "list": ["x"]}', True),
        ('{"n": 1.5}', False),
        ('{"n": true}', False),
        ("{}", False),
        ('{"n": 1, "more": 2}', False),
        ('{"n": 1, "kind": "c"}', False),
        ('{"n": 1, "list": [1]}', False),
        ("not JSON", False),
    ],
)
def test_an_answer_against_its_schema(text: str, is_fine: bool) -> None:
    wanted = fields(response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}})
    assert (schema_problem(wanted, body(text)) is None) == is_fine
    assert judge(AcceptConfig(), wanted, body(text)).accepted == is_fine
    assert judge(AcceptConfig(schema=False), wanted, body(text)).accepted


def test_only_errors_of_the_small_model_go_on_to_the_large_one() -> None:
    from inferry.domain import errors

    assert may_escalate(errors.WorkerLost("x"))
    assert may_escalate(errors.ContextLengthExceeded("x"))
    assert may_escalate(errors.UnsupportedFeature("x"))
    for error in (errors.RunCancelled, errors.RunBudgetExhausted, errors.InvalidRequest, errors.DeadlineExceeded):
        assert not may_escalate(error("x"))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=9), st.integers(0, 9))
def test_a_decided_vote_cannot_change(values: list[str], seen: int) -> None:
    early = dict(enumerate(values[:seen]))
    every = dict(enumerate(values))
    if votes.is_decided(early, len(values) - len(early)):
        assert every[votes.leader(early)] == every[votes.leader(every)]
    assert votes.is_decided(every, 0)


@given(st.dictionaries(st.integers(0, 15), st.sampled_from("abc"), min_size=1))
def test_the_leader_has_the_most_votes(cast: dict[int, object]) -> None:
    counts = [list(cast.values()).count(value) for value in cast.values()]
    assert list(cast.values()).count(cast[votes.leader(cast)]) == max(counts)
    assert votes.share(cast, votes.leader(cast)) == max(counts) / len(cast)
    assert votes.best([(0, 0.1), (1, 0.9), (2, 0.9)]) == 1
