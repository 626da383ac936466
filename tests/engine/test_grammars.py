"""Outputs of the engine under grammars, with random weights."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from inferry.domain.constraints import Constraint, ToolSpec
from inferry.domain.sampling import Sampling
from inferry.engine import grammars
from inferry.engine.grammar_text import grammar_text
from inferry.engine.grammars import Grammars
from inferry.engine.matcher import Matcher
from inferry.engine.messages import Request
from inferry.engine.sampling import mask_words, sample
from inferry.engine.sequences import Sequence
from support.grammar_fixtures import (
    PROMPT,
    SETTINGS,
    TICKET,
    GrammarEngine,
    a_request,
    of_schema,
    write_byte_tokenizer,
)


def test_free_rows_are_not_touched_by_constrained_ones(tiny_dir: Path) -> None:
    engine = GrammarEngine(tiny_dir)
    free = [a_request(key, None, tokens=20, sampling=SETTINGS[key % 4], prompt=[key + 7] * 5) for key in range(4)]
    alone = engine.run(free).outputs
    constrained = [a_request(10 + key, of_schema(TICKET)) for key in range(4)]
    mixed = GrammarEngine(tiny_dir).run([*constrained, *free]).outputs
    assert {key: mixed[key] for key in range(4)} == alone


def test_the_logits_of_free_rows_keep_every_bit(tiny_dir: Path) -> None:
    engine = GrammarEngine(tiny_dir)
    sequences = [
        Sequence(key, PROMPT, sampling=SETTINGS[key % 4], lane=0, arrival=key, limit=99, seed=key) for key in range(6)
    ]
    logits = torch.randn(6, 4096)
    expected_tokens, expected = sample(logits.clone(), sequences), logits.clone()
    assert engine.core.add(a_request(1, of_schema(TICKET))) is None
    ((compiled, _),) = engine.grammars.collect(0.0, 60.0)
    sequences[2].matcher = compiled.matcher
    tokens = sample(logits, sequences)
    for row in (0, 1, 3, 4, 5):
        assert torch.equal(logits[row], expected[row])
        assert tokens[row] == expected_tokens[row]
    allowed = ~torch.isinf(logits[2])
    assert 0 < int(allowed.sum()) < 100
    assert torch.equal(logits[2][allowed], expected[2][allowed])
    assert bool(allowed[tokens[2]])


def test_free_sequences_cost_nothing_more(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GrammarEngine(tiny_dir).run([a_request(1, of_schema(TICKET))])
    for name in ("start", "collect", "discard"):
        monkeypatch.setattr(engine.grammars, name, None)
    monkeypatch.setattr("inferry.engine.sampling.fill_masks", None)
    monkeypatch.setattr("inferry.engine.core.without_awaiting", None)
    engine.run([a_request(key, None, tokens=5) for key in range(2, 6)])


def test_slashes_and_lines_of_a_regular_expression_are_kept(tiny_dir: Path) -> None:
    engine = GrammarEngine(tiny_dir).run([a_request(1, Constraint("guided_regex", regex="a/b\\/c\\\\\n[x/]"))])
    assert engine.text(1) in ("a/b/c\\\nx", "a/b/c\\\n/")


def test_an_output_ends_with_its_grammar_also_where_end_tokens_are_ignored(tiny_dir: Path) -> None:
    sampling = Sampling(max_tokens=400, seed=1, ignore_eos=True, constraint=of_schema(TICKET))
    engine = GrammarEngine(tiny_dir).run([Request(1, PROMPT, sampling, lane=1)])
    assert engine.ends[1].stopped
    json.loads(engine.text(1))


def test_an_output_that_its_limit_completes_has_stopped(tiny_dir: Path) -> None:
    constraint = Constraint("guided_choice", choices=("yes",))
    whole = GrammarEngine(tiny_dir).run([a_request(1, constraint)])
    length = len(whole.outputs[1])
    cut = GrammarEngine(tiny_dir).run([a_request(1, constraint, tokens=length)])
    assert cut.ends[1].stopped
    assert cut.text(1) == "yes"


@pytest.mark.parametrize(
    "constraint",
    [
        of_schema({"type": "string", "pattern": "(a"}),
        of_schema({"$ref": "#/$defs/absent"}),
        of_schema({"$ref": "#"}),
        of_schema({"not": {}}),
        Constraint("guided_regex", regex="[z-a]"),
        Constraint("guided_grammar", lark="start: unknown_rule"),
        Constraint("guided_grammar", lark="% not a grammar"),
    ],
)
def test_an_invalid_grammar_ends_its_sequence_alone(tiny_dir: Path, constraint: Constraint) -> None:
    engine = GrammarEngine(tiny_dir).run([a_request(1, constraint), a_request(2, None, tokens=5)])
    assert engine.ends[1].error
    assert "llguidance" not in engine.ends[1].error
    assert engine.ends[1].account.output_tokens == 0
    assert len(engine.outputs[2]) == 5


_COMPILE = """
import sys
from pathlib import Path
from inferry.domain.constraints import Constraint
from inferry.domain.sampling import Sampling
from inferry.engine.grammars import Grammars
from inferry.engine.sequences import Sequence

compiler = Grammars(Path(sys.argv[1]), 300, frozenset({0}), None)
sequence = Sequence(1, [1], sampling=Sampling(), lane=0, arrival=0, limit=9)
compiler.start(sequence, Constraint("", **{sys.argv[2]: sys.stdin.read()}), [], 0.0)
((_, error),) = compiler.collect(0.0, 60.0)
print(error)
"""


def compiled_in_a_child(directory: Path, field: str, text: str) -> str:
    """The error of a constraint. The stack of the child's compiler may overflow."""
    write_byte_tokenizer(directory, 300)
    command = [sys.executable, "-c", _COMPILE, str(directory), field]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def a_chain(length: int) -> str:
    places = {f"p{index}": {"$ref": f"#/x/p{index + 1}"} for index in range(length)}
    return json.dumps({"$ref": "#/x/p0", "x": {**places, f"p{length}": {"type": "null"}}})


def test_a_schema_with_a_long_chain_of_references_is_refused(tmp_path: Path) -> None:
    assert compiled_in_a_child(tmp_path, "schema", a_chain(5_000)) == (
        "the schema has references to more than 1000 places"
    )
    assert "1000 places" not in compiled_in_a_child(tmp_path, "schema", a_chain(900))


def test_a_grammar_with_a_long_chain_of_rules_does_not_end_the_engine(tmp_path: Path) -> None:
    chain = "".join(f"A{index}: A{index + 1}\n" for index in range(5_000))
    assert compiled_in_a_child(tmp_path, "lark", f'start: A0\n{chain}A5000: "x"\n') == "None"
    assert "65536 characters" in compiled_in_a_child(tmp_path, "lark", "start: a" + " " * 65_536)


def test_a_keyword_that_cannot_be_enforced_is_ignored_where_the_schema_is_not_strict(tiny_dir: Path) -> None:
    schema = {**TICKET, "not": {"required": ["other"]}}
    engine = GrammarEngine(tiny_dir).run([a_request(1, of_schema(schema, is_strict=False))])
    assert jsonschema_rs.is_valid(TICKET, json.loads(engine.text(1)))


def test_options_in_a_schema_do_not_replace_those_of_the_engine(tiny_dir: Path) -> None:
    schema = {**TICKET, "x-guidance": {"whitespace_pattern": " {100}", "lenient": True}}
    engine = GrammarEngine(tiny_dir).run([a_request(1, of_schema(schema))])
    assert " " * 30 not in engine.text(1)


def test_a_sequence_is_aborted_while_its_grammar_is_compiled(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GrammarEngine(tiny_dir)
    go_on = threading.Event()
    monkeypatch.setattr(grammars, "grammar_text", lambda constraint, form: str(go_on.wait(60)))
    engine.core.add(a_request(1, of_schema(TICKET)))
    engine.core.add(a_request(2, None, tokens=3))
    engine.step()  # the other sequence does not wait for the compiler
    assert engine.outputs == {2: engine.outputs[2]}
    (freed,) = engine.core.abort([1])
    go_on.set()
    assert freed.key == 1
    engine.run([])


def test_a_grammar_that_takes_too_long_is_refused(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GrammarEngine(tiny_dir)
    go_on, running = threading.Event(), threading.Event()

    def blocked(constraint: Constraint, form: Any) -> str:
        running.set()
        return str(go_on.wait(60))

    monkeypatch.setattr(grammars, "grammar_text", blocked)
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 0.0)
    assert engine.core.add(a_request(1, of_schema(TICKET))) is None
    assert running.wait(60)  # what no thread has begun is refused as busy
    engine.run([])
    go_on.set()
    assert "within 0 s" in str(engine.ends[1].error)


def test_a_grammar_that_was_not_started_is_no_error_of_the_caller(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = GrammarEngine(tiny_dir)
    slow = grammars._THREADS
    go_on, running = threading.Event(), threading.Barrier(slow + 1)

    def blocked(constraint: Constraint, form: Any) -> str:
        running.wait(60)
        return str(go_on.wait(60))

    monkeypatch.setattr(grammars, "grammar_text", blocked)
    monkeypatch.setattr(grammars, "COMPILE_TIMEOUT_S", 0.0)
    for key in range(slow):
        engine.core.add(a_request(key, Constraint("guided_choice", choices=(str(key),))))
    running.wait(60)  # all threads are busy
    engine.run([a_request(slow, of_schema(TICKET))])
    go_on.set()
    assert {key: end.is_busy for key, end in engine.ends.items()} == {key: key == slow for key in range(slow + 1)}


def test_two_slow_grammars_delay_no_other_call(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = GrammarEngine(tiny_dir)
    go_on = threading.Event()

    def slow(constraint: Constraint, form: Any) -> str:
        if constraint.choices is not None and constraint.choices[0].startswith("slow"):
            go_on.wait(60)
        return grammar_text(constraint, form)

    monkeypatch.setattr(grammars, "grammar_text", slow)
    texts = ["slow 1", "slow 2", "quick"]
    for key, text in enumerate(texts):
        engine.core.add(a_request(key, Constraint("guided_choice", choices=(text,))))
    assert engine.core._grammars is not None
    compiling = engine.core._grammars._compiling
    compiling[2].compiled.result(60)
    assert not compiling[0].compiled.done()
    go_on.set()


def test_a_long_grammar_in_gbnf_is_refused(tiny_dir: Path) -> None:
    rules = "".join(f"r{index} ::= r{index + 1}\n" for index in range(1_500))
    engine = GrammarEngine(tiny_dir).run([a_request(1, Constraint("guided_grammar", lark=f"root ::= r0\n{rules}"))])
    assert "GBNF has at most 16384 characters" in str(engine.ends[1].error)
    short = Constraint("guided_grammar", lark='root ::= word\nword ::= "yes"\n')
    assert GrammarEngine(tiny_dir).run([a_request(1, short)]).text(1) == "yes"


def test_a_compiled_grammar_is_used_again_and_the_cache_is_bounded(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_CACHED", 2)
    compiled: list[Constraint] = []

    def counted(constraint: Constraint, form: Any) -> str:
        compiled.append(constraint)
        return grammar_text(constraint, form)

    monkeypatch.setattr(grammars, "grammar_text", counted)
    choices = [Constraint("guided_choice", choices=(text,)) for text in ("a", "b", "c")]
    engine = GrammarEngine(tiny_dir)
    for key, which in enumerate([0, 1, 0, 1, 2, 1, 2, 0]):
        engine.run([a_request(key, choices[which])])
        assert engine.text(key) == "abc"[which]
    assert compiled == [choices[0], choices[1], choices[2], choices[0]]


def test_tools_are_called_in_the_format_of_the_model(tiny_dir: Path) -> None:
    tools = (ToolSpec("open", json.dumps(TICKET)), ToolSpec("close", '{"type":"object","additionalProperties":false}'))
    must = Constraint("tools", tools=tools, must_call=True, is_parallel=False)
    hermes = GrammarEngine(tiny_dir).run([a_request(key, must) for key in range(4)])
    for key in range(4):
        text = hermes.text(key)
        assert text.startswith('<tool_call>\n{"name": "')
        assert text.endswith("}\n</tool_call>")
        assert text.count("<tool_call>") == 1
        call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
        assert jsonschema_rs.is_valid(
            json.loads({tool.name: tool.schema for tool in tools}[call["name"]]), call["arguments"]
        )
    llama = GrammarEngine(tiny_dir, tool_format="llama3_json").run([a_request(1, must)])
    assert sorted(json.loads(llama.text(1))) == ["name", "parameters"]
    several = Constraint("tools", tools=tools, must_call=True)
    mistral = GrammarEngine(tiny_dir, tool_format="mistral").run([a_request(key, several) for key in range(3)])
    for key in range(3):
        if mistral.ends[key].stopped:
            assert all(sorted(one) == ["arguments", "name"] for one in json.loads(mistral.text(key)[12:]))


def test_a_model_that_may_call_is_free_until_it_begins_a_call(tiny_dir: Path) -> None:
    engine = GrammarEngine(tiny_dir)
    may = Constraint("tools", tools=(ToolSpec("open", json.dumps(TICKET)),), is_parallel=False)
    free = engine.run([a_request(1, None, tokens=12), a_request(2, may, tokens=12, sampling=Sampling(seed=1))])
    assert free.outputs[2] == free.outputs[1]
    begun = engine.tokenizer.encode("Let me see <tool> <tool_call>")[1:]
    engine.run([a_request(3, may, prompt=[*PROMPT, *begun], output_ids=len(begun))])
    assert engine.ends[3].stopped
    assert engine.text(3).startswith('\n{"name": "open", "arguments": {')
    call = json.loads(engine.text(3).removesuffix("</tool_call>"))
    assert jsonschema_rs.is_valid(TICKET, call["arguments"])


def allowed_tokens(matcher: Matcher, vocabulary: int) -> set[int]:
    masks = torch.zeros(1, mask_words(vocabulary), dtype=torch.int32)
    matcher.fill(masks.data_ptr(), masks.shape[1] * 4)
    return {token for token in range(vocabulary) if (int(masks[0, token // 32]) >> (token % 32)) & 1}


def test_a_special_token_begins_the_calls_of_mistral(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 300, ("<|end|>", "[TOOL_CALLS]", "<|other|>"))
    text = FastTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    compiler = Grammars(tmp_path, 300, frozenset({0}), "mistral")
    sequence = Sequence(1, PROMPT, sampling=Sampling(), lane=0, arrival=0, limit=9)
    written = text.encode("So [it").ids
    may = Constraint("tools", tools=(ToolSpec("f", '{"type":"object","additionalProperties":false}'),))
    compiler.start(sequence, may, written, 0.0)
    assert compiler.collect(0.0, 60.0) == [(sequence, None)]
    assert sequence.matcher is not None
    before = allowed_tokens(sequence.matcher, 300)
    assert {0, 1} < before  # the end, and the begin of calls
    assert 2 not in before
    assert sequence.matcher.consume(1)
    assert {text.decode([token]) for token in allowed_tokens(sequence.matcher, 300)} <= {" ", "["}
    for token in text.encode('[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]').ids:
        assert sequence.matcher.consume(token)
    assert sequence.matcher.is_complete


def test_text_is_free_of_braces_at_its_start_where_calls_have_no_mark(tiny_dir: Path) -> None:
    engine = GrammarEngine(tiny_dir, tool_format="llama3_json")
    may = Constraint("tools", tools=(ToolSpec("open", json.dumps(TICKET)),))
    begun = engine.tokenizer.encode("{")[1:]
    engine.run([a_request(1, may, prompt=[*PROMPT, *begun], output_ids=len(begun))])
    assert sorted(json.loads("{" + engine.text(1))) == ["name", "parameters"]
