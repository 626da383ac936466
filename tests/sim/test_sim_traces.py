"""Traces in four formats, recognised by their content."""

import gzip
from pathlib import Path

import pytest

from inferry.domain.lanes import Lane
from inferry.sim.prompts import block_hashes, length
from inferry.sim.traces import TraceError, UnknownTrace, read_trace


def a_file(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_times_and_lengths(tmp_path: Path) -> None:
    path = a_file(tmp_path, "calls.csv.gz", "t_ms,input_tokens,output_tokens\n0.0,480,10\n52.5,31,8\n")
    runs = read_trace(path, Lane.P0)
    assert [(run.at, length(run.steps[0].prompt), run.steps[0].output) for run in runs] == [
        (0.0, 480, 10),
        (0.0525, 31, 8),
    ]
    assert runs[0].lane is Lane.P0


def test_calls_with_block_hashes_begin_alike_where_the_hashes_do(tmp_path: Path) -> None:
    rows = (
        '{"t_ms":0,"t_spread_ms":15.0,"input_tokens":1100,"output_tokens":5,"hash_ids":[0,1,2]}\n'
        '{"t_ms":0,"t_spread_ms":20.0,"input_tokens":1100,"output_tokens":0,"hash_ids":[0,1,9]}\n'
    )
    one, two = read_trace(a_file(tmp_path, "m.jsonl.gz", rows))
    assert (one.at, two.steps[0].output) == (0.015, 1)
    a, b = (block_hashes(run.steps[0].prompt, 16) for run in (one, two))
    assert a[:64] == b[:64]
    assert not set(a[64:]) & set(b[64:])


def test_sessions_are_closed_loops_with_thinking_between_calls(tmp_path: Path) -> None:
    rows = (
        '{"session":"s","agent":0,"step":0,"t_ms":0,"input_tokens":130,"output_tokens":7,"think_ms":0,"hash_runs":[[1,2]]}\n'
        '{"session":"s","agent":0,"step":1,"t_ms":9000,"input_tokens":200,"output_tokens":9,"think_ms":3000,"hash_runs":[[1,3]]}\n'
        '{"session":"t","agent":0,"step":0,"t_ms":0,"input_tokens":130,"output_tokens":7,"think_ms":null,"hash_runs":[[1,2]]}\n'
    )
    one, other = read_trace(a_file(tmp_path, "w.jsonl", rows), session_gap_s=2.0)
    assert [step.tool_s for step in one.steps] == [3.0, 0.0]
    assert [length(step.prompt) for step in one.steps] == [130, 200]
    assert (one.at, other.at) == (0.0, 2.0)
    assert one.steps[0].prompt[0] != other.steps[0].prompt[0]


def test_sessions_without_times_start_apart(tmp_path: Path) -> None:
    rows = (
        '{"session":"a","step":0,"t_ms":null,"input_tokens":300,"output_tokens":7,"hash_runs":[[0,2]]}\n'
        '{"session":"b","step":0,"t_ms":null,"input_tokens":300,"output_tokens":7,"hash_runs":[[0,1],[5,1]]}\n'
    )
    one, other = read_trace(a_file(tmp_path, "n.jsonl.gz", rows), session_gap_s=0.5)
    assert (one.at, other.at) == (0.0, 0.5)
    assert one.steps[0].prompt[0] == other.steps[0].prompt[0]
    assert length(one.steps[0].prompt) == 300


def test_anything_else_is_refused_with_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(UnknownTrace, match="colour"):
        read_trace(a_file(tmp_path, "x.jsonl", '{"colour":1}\n'))


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.csv", "t_ms,input_tokens,output_tokens\n0,10,5\n\n5,10\n", r"line 4: expected 3 values \(t_ms, .*got 2"),
        ("a.csv", "t_ms,input_tokens,output_tokens\n0,ten,5\n", r"line 2: input_tokens: expected `int`"),
        ("a.csv", "t_ms,input_tokens,output_tokens\n0,-10,5\n", r"line 2: input_tokens: expected `int` >= 0"),
        ("m.jsonl", '{"t_ms":0,"input_tokens":9,"output_tokens":5,"hash_ids":[1]}\n{"t_ms":0,\n', r"line 2: .* JSON"),
        ("m.jsonl", '{"t_ms":0,"input_tokens":9,"output_tokens":5,"hash_ids":[1]}\n[1]\n', r"line 2: expected a JSON"),
        ("m.jsonl", '{"t_ms":0,"input_tokens":9,"output_tokens":5,"hash_ids":["x"]}\n', r"line 1: hash_ids"),
        ("m.jsonl", '{"t_ms":0,"input_tokens":9,"hash_ids":[1]}\n', r"line 1: .*`output_tokens`"),
        ("s.jsonl", '{"session":"a","input_tokens":9,"output_tokens":5,"hash_runs":[[1]]}\n', r"line 1: hash_runs"),
        (
            "c.jsonl",
            '{"session":"a","input_tokens":9,"output_tokens":5,"think_ms":"long","hash_runs":[]}\n',
            "think_ms",
        ),
        ("e.jsonl", "", "is empty"),
    ],
)
def test_a_line_that_cannot_be_read_is_named_with_what_was_expected(
    tmp_path: Path, name: str, text: str, complaint: str
) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_trace(a_file(tmp_path, name, text))


def test_a_packed_file_that_ends_too_early_is_named_with_how_far_it_went(tmp_path: Path) -> None:
    lines = "".join(f"{number},{number % 977},{number % 31}\n" for number in range(20_000))
    whole = gzip.compress(f"t_ms,input_tokens,output_tokens\n{lines}".encode())
    path = tmp_path / "cut.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"after line \d+: the file cannot be read further"):
        read_trace(path)


def test_what_a_file_is_does_not_depend_on_its_name(tmp_path: Path) -> None:
    packed = tmp_path / "calls"
    packed.write_bytes(gzip.compress(b"t_ms,input_tokens,output_tokens\n0,480,10\n"))
    assert length(read_trace(packed)[0].steps[0].prompt) == 480
