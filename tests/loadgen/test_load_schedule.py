"""What a bench sends, and when: the same options give the same calls, to the last token."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from inferry.domain.lanes import Lane
from inferry.loadgen.prompt_texts import PromptTexts
from inferry.loadgen.requests import RequestForm, RequestMaker, RequestMetadata
from inferry.loadgen.traffic import (
    Agents,
    Bursts,
    EmptyLoad,
    TrafficOptions,
    fit_to_context,
    make_runs,
    parse_agents,
    parse_bursts,
    parse_lane_shares,
    parse_range,
)
from inferry.sim.calls import Run
from inferry.sim.harbor import harbor
from inferry.sim.prompts import length
from inferry.workers.http_client import Client

MIXED = {Lane.P0: 0.3, Lane.P1: 0.4, Lane.P2: 0.3}
SHARING_KINDS = {
    "poisson": TrafficOptions(poisson_per_s=20, seconds=5, lanes=MIXED),
    "bursts": TrafficOptions(bursts=Bursts(10, 2, 0.5), seconds=5, lanes=MIXED),
    "agents": TrafficOptions(agents=Agents(8, 4), seconds=5, lanes=MIXED),
    "harbor": TrafficOptions(scenario="harbor", seconds=10, scale=0.3),
}


def maker(
    form: RequestForm = RequestForm(),  # noqa: B008
    request_metadata: RequestMetadata = RequestMetadata(),  # noqa: B008
    salt: str = "s",
) -> RequestMaker:
    return RequestMaker(Client("http://h", {}, 1.0), "m", form, request_metadata, salt)


def written(run: Run, salt: str = "s", form: RequestForm = RequestForm()) -> Sequence[bytes]:  # noqa: B008
    requests = maker(form, salt=salt)
    return [b"".join(map(bytes, requests.make(run, index))) for index in range(len(run.steps))]


def body(request: bytes) -> dict[str, object]:
    decoded: dict[str, object] = msgspec.json.decode(request.partition(b"\r\n\r\n")[2])
    return decoded


@pytest.mark.parametrize("traffic", SHARING_KINDS.values(), ids=SHARING_KINDS)
def test_the_same_seed_gives_the_same_calls_at_the_same_times(traffic: TrafficOptions) -> None:
    runs = make_runs(traffic)
    assert runs == make_runs(traffic)
    assert runs != make_runs(msgspec.structs.replace(traffic, seed=8))
    assert [run.at for run in runs] == sorted(run.at for run in runs)
    assert written(runs[0]) == written(runs[0])


def test_harbor_is_what_the_simulator_plays() -> None:
    simulated = harbor(11, seconds=10, scale=0.3, digests=20)
    runs = make_runs(TrafficOptions(scenario="harbor", seconds=10, scale=0.3, digests=20, seed=11))
    assert sorted(runs, key=lambda run: run.run_id) == sorted(simulated, key=lambda run: run.run_id)


def test_traces_are_read(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("t_ms,input_tokens,output_tokens\n0,100,10\n500,200,20\n900,300,30\n")
    runs = make_runs(TrafficOptions(trace=trace, scale=2))
    assert [(run.at, length(run.steps[0].prompt), run.steps[0].output) for run in runs] == [
        (0.0, 100, 10),
        (0.25, 200, 20),
        (0.45, 300, 30),
    ]


def test_prompts_have_the_length_that_was_asked_for_and_begin_alike_where_runs_do() -> None:
    run = max(make_runs(SHARING_KINDS["harbor"]), key=lambda run: len(run.steps))
    prompts = [body(request)["prompt"] for request in written(run)]
    for step, prompt in zip(run.steps, prompts, strict=True):
        assert isinstance(prompt, list)
        assert len(prompt) == length(step.prompt)
    shared = sum(piece[2] for piece in run.steps[0].prompt[:2])
    first, second = prompts[:2]
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert first[:shared] == second[:shared]
    assert first[shared:] != second[shared : len(first)]


def test_another_salt_leaves_nothing_for_a_cache_to_find() -> None:
    run = make_runs(SHARING_KINDS["poisson"])[0]
    one, other = (body(written(run, salt)[0])["prompt"] for salt in ("a", "b"))
    assert isinstance(one, list)
    assert isinstance(other, list)
    assert one[:16] != other[:16]


def test_it_does_not_matter_how_much_of_a_segment_was_asked_for_before() -> None:
    early, late = PromptTexts("s"), PromptTexts("s")
    early.prompt([(1, 0, 10)])
    assert early.prompt([(1, 5, 200)]) == late.prompt([(1, 5, 200)])
    assert late.prompt([(1, 0, 205)]).endswith(late.prompt([(1, 5, 200)]))


@pytest.mark.parametrize(("kind", "field"), [("text", "prompt"), ("chat", "messages")])
def test_prompts_can_be_words(kind: str, field: str) -> None:
    run = make_runs(SHARING_KINDS["poisson"])[0]
    form = RequestForm(kind, words_per_token=0.5)  # type: ignore[arg-type]
    said = body(written(run, form=form)[0])[field]
    text = said[0]["content"] if isinstance(said, list) else said
    assert len(str(text).split()) == round(length(run.steps[0].prompt) / 2)


def test_prompts_that_do_not_fit_are_cut_and_counted() -> None:
    runs = make_runs(TrafficOptions(poisson_per_s=20, seconds=2, prompt_tokens=(50, 150), output_tokens=(10, 10)))
    fitting, cut = fit_to_context(runs, 100)
    assert 0 < cut < len(runs)
    assert max(length(run.steps[0].prompt) + run.steps[0].output for run in fitting) == 100
    assert fit_to_context(runs, None) == (runs, 0)


def test_runs_of_two_benches_have_names_of_their_own() -> None:
    run = make_runs(SHARING_KINDS["poisson"])[0]
    assert b"x-inferry-run-id: a-call-0\r\n" in written(run, "a")[0]
    assert b"x-inferry-run-id: b-call-0\r\n" in written(run, "b")[0]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_bursts, "10,2"),
        (parse_bursts, "0,2,1"),
        (parse_bursts, "a,b,c"),
        (parse_agents, "10"),
        (parse_agents, "10,2,3-1"),
        (parse_agents, "10,2,1,1"),
        (parse_lane_shares, "P7"),
        (lambda text: parse_range("--prompt-tokens", text), "20-10"),
        (lambda text: parse_range("--prompt-tokens", text), "0"),
        (lambda text: make_runs(TrafficOptions(poisson_per_s=float(text))), "0"),
        (lambda text: make_runs(TrafficOptions(scenario=text)), "nowhere"),
        (lambda text: make_runs(TrafficOptions(trace=Path(text))), "absent.csv"),
        (lambda text: make_runs(TrafficOptions(poisson_per_s=1, scenario=text)), "harbor"),
        (lambda text: make_runs(TrafficOptions(poisson_per_s=0.001, seconds=float(text))), "1"),
    ],
)
def test_an_empty_load_is_refused(read: object, text: str) -> None:
    with pytest.raises(EmptyLoad):
        read(text)  # type: ignore[operator]


def test_option_values_are_parsed() -> None:
    assert parse_bursts("40,10,1") == Bursts(40, 10.0, 1.0)
    assert parse_agents("20,6") == Agents(20, 6, (0.05, 0.5))
    assert parse_agents("20,6,0.1-2") == Agents(20, 6, (0.1, 2.0))
    assert parse_range("--prompt-tokens", "7") == (7, 7)
