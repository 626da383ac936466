"""The core with a runner that computes a step while the next one is planned."""

import random
from collections import deque
from collections.abc import Sequence

import pytest

from inferry.domain.constraints import Constraint
from inferry.domain.sampling import Sampling
from inferry.domain.workers import EngineMode
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.grammars import Grammars
from inferry.engine.matcher import Matcher
from inferry.engine.messages import End, Request
from inferry.engine.planner import Work
from inferry.engine.runners import UNKNOWN
from inferry.engine.sequences import Sequence as EngineSequence
from support.engine_fixtures import FakeRunner, drain, fake_output, greedy, note

CONFIG = EngineConfig(max_sequences=4, kv_tokens=256, chunk_tokens=16, block_tokens=4)


class OverlappingFake(FakeRunner):
    """Knows the tokens of the step before only as a device does: by the sequence they were sampled for."""

    def __init__(self, config: EngineConfig, **more: frozenset[int]) -> None:
        super().__init__(config, **more)  # type: ignore[arg-type]
        self.in_flight: deque[list[int]] = deque()
        self.most_in_flight = 0
        self._last: dict[int, int] = {}

    def launch(self, work: Sequence[Work]) -> None:
        unknown = [piece.sequence for piece in work if piece.sequence.tokens[-1] == UNKNOWN]
        for sequence in unknown:
            sequence.tokens[-1] = self._last[sequence.key]
        ending = [piece.sequence for piece in work if piece.tokens == piece.sequence.pending]
        sampled = self.execute(work)
        for sequence in unknown:
            sequence.tokens[-1] = UNKNOWN
        self._last = {sequence.key: token for sequence, token in zip(ending, sampled, strict=True)}
        self.in_flight.append(sampled)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def collect(self) -> list[int]:
        return self.in_flight.popleft()


def a_request(key: int, length: int, sampling: Sampling) -> Request:
    generator = random.Random(key)
    return Request(
        key, [generator.randrange(1, 90) for _ in range(length)], sampling, lane=key % 3, is_batch=key % 3 == 2
    )


def test_a_second_step_is_launched_before_the_first_is_collected() -> None:
    runner = OverlappingFake(CONFIG)
    core = EngineCore(runner, CONFIG)
    core.add(a_request(1, 5, greedy(6)))
    core.step()
    assert len(runner.in_flight) == 1
    drain(core)
    assert runner.most_in_flight == 2


def test_prefixes_are_cached_over_known_tokens_only() -> None:
    """A second call starts with the prompt and the output of the first one."""
    core = EngineCore(OverlappingFake(CONFIG), CONFIG)
    first = a_request(1, 9, greedy(8))
    core.add(first)
    output = drain(core)[1]
    prompt = [*first.prompt_ids, *output, 3]
    core.add(Request(2, prompt, greedy(5), lane=0))
    tokens: list[int] = []
    cached: list[int] = []
    while core.has_work:
        done = core.step()
        tokens += [token for _, token in done.tokens]
        cached += [end.account.cached_tokens for end in done.ends]
    assert tokens == fake_output(prompt, 5)
    assert cached == [16]


@pytest.mark.parametrize("kv_tokens", [256, 48])
def test_tokens_do_not_depend_on_the_overlap(kv_tokens: int) -> None:
    config = EngineConfig(max_sequences=4, kv_tokens=kv_tokens, chunk_tokens=16, block_tokens=4)
    core = EngineCore(OverlappingFake(config), config)
    requests = [a_request(key, 1 + 5 * key % 17, greedy(14 + key % 9)) for key in range(20)]
    for request in requests:
        assert core.add(request) is None
    outputs = drain(core)
    for request in requests:
        assert outputs[request.key] == fake_output(request.prompt_ids, request.sampling.max_tokens)
    assert core.pool.free == core.pool.total
    assert (core.stats().preemptions > 0) == (kv_tokens == 48)


def test_the_token_computed_after_a_stop_token_is_discarded() -> None:
    request = a_request(1, 5, greedy(30))
    expected = fake_output(request.prompt_ids, 30)
    stop = expected[7]
    expected = expected[: expected.index(stop) + 1]
    sampling = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    core = EngineCore(OverlappingFake(CONFIG), CONFIG)
    core.add(Request(1, request.prompt_ids, sampling, lane=0))
    tokens: list[int] = []
    ends: list[End] = []
    for _ in range(40):
        done = core.step()
        tokens += [token for _, token in done.tokens]
        ends += done.ends
    assert tokens == expected
    assert [(end.stopped, end.account.output_tokens) for end in ends] == [(True, len(expected))]
    assert core.pool.free == core.pool.total


def test_no_step_computes_a_token_beyond_the_limit() -> None:
    runner = OverlappingFake(CONFIG)
    computed: list[int] = []
    runner.before = lambda work: computed.extend(piece.tokens for piece in work)
    core = EngineCore(runner, CONFIG)
    core.add(a_request(1, 5, greedy(6)))
    drain(core)
    core.step()
    assert computed == [5, 1, 1, 1, 1, 1]


def test_random_aborts_free_every_block_and_change_no_other_token() -> None:
    generator = random.Random(4)
    core = EngineCore(OverlappingFake(CONFIG), CONFIG)
    requests = {key: a_request(key, 1 + key % 13, greedy(2 + key % 11)) for key in range(40)}
    outputs: dict[int, list[int]] = {key: [] for key in requests}
    waiting, aborted = [*requests], set()
    while waiting or core.has_work:
        if waiting and generator.random() < 0.7:
            core.add(requests[waiting.pop()])
        if generator.random() < 0.2:
            for account in core.abort([generator.randrange(40)]):
                aborted.add(account.key)
                assert account.output_tokens == len(outputs[account.key])
        for key, token in core.step().tokens:
            assert key not in aborted
            outputs[key].append(token)
    assert aborted
    for key, request in requests.items():
        expected = fake_output(request.prompt_ids, request.sampling.max_tokens)
        assert outputs[key] == (expected[: len(outputs[key])] if key in aborted else expected)
    assert core.pool.free == core.pool.total


@pytest.mark.parametrize("mode", ["continuous", "hybrid", "dynamic", "static"])
@pytest.mark.parametrize("kv_tokens", [64, 256])
def test_every_mode_gives_the_same_tokens_with_steps_in_flight(mode: EngineMode, kv_tokens: int) -> None:
    for seed in range(20):
        generator = random.Random(seed)
        config = EngineConfig(mode=mode, max_sequences=3, kv_tokens=kv_tokens, chunk_tokens=8, block_tokens=4)
        core = EngineCore(OverlappingFake(config), config)
        requests = [a_request(key, generator.randint(1, 20), greedy(generator.randint(1, 20))) for key in range(10)]
        outputs: dict[int, list[int]] = {}
        aborted = set()
        for request in requests:
            core.add(request)
            for _ in range(generator.randint(0, 3)):
                note(core.step(), outputs)
            if generator.random() < 0.2:
                aborted.add(request.key)
                core.abort([request.key])
        drain(core, outputs)
        assert core.pool.free == core.pool.total
        for request in requests:
            output = outputs.get(request.key, [])
            assert output == fake_output(request.prompt_ids, len(output))
            assert request.key in aborted or len(output) == request.sampling.max_tokens


class CountingMatcher(Matcher):
    """A grammar of `length` tokens, whichever."""

    def __init__(self, length: int) -> None:
        super().__init__(None)
        self.consumed: list[int] = []
        self._length = length

    def consume(self, token: int) -> bool:
        self.consumed.append(token)
        return True

    @property
    def is_complete(self) -> bool:
        return len(self.consumed) == self._length


class InstantGrammars(Grammars):
    """Compiles at once."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._started: list[EngineSequence] = []
        self.matchers: dict[int, CountingMatcher] = {}

    @property
    def is_compiling(self) -> bool:
        return bool(self._started)

    def start(self, sequence: EngineSequence, constraint: Constraint, output_ids: list[int], now: float) -> None:
        sequence.matcher = self.matchers[sequence.key] = CountingMatcher(self._length)
        self._started.append(sequence)

    def collect(self, now: float, timeout_s: float) -> list[tuple[EngineSequence, str | None]]:
        started, self._started = self._started, []
        return [(sequence, None) for sequence in started]

    def discard(self, key: int) -> None:
        pass


@pytest.mark.parametrize("kv_tokens", [256, 28])
@pytest.mark.parametrize("mode", ["continuous", "hybrid", "dynamic", "static"])
def test_a_token_under_a_grammar_is_sampled_after_the_one_before_it_is_known(mode: EngineMode, kv_tokens: int) -> None:
    config = EngineConfig(mode=mode, max_sequences=4, kv_tokens=kv_tokens, chunk_tokens=16, block_tokens=4)
    runner = OverlappingFake(config)
    grammars = InstantGrammars(length=9)
    core = EngineCore(runner, config, grammars=grammars)
    steps: list[set[int]] = []
    wrong: list[int] = []

    def before(work: Sequence[Work]) -> None:
        steps.append({piece.sequence.key for piece in work})
        for piece in work:
            matcher, sequence = piece.sequence.matcher, piece.sequence
            if isinstance(matcher, CountingMatcher) and len(matcher.consumed) != sequence.output_tokens:
                wrong.append(sequence.key)

    runner.before = before
    constrained = Sampling(temperature=0.0, max_tokens=30, ignore_eos=True, constraint=Constraint("response_format"))
    requests = [a_request(1, 5, constrained), a_request(2, 5, greedy(14)), a_request(3, 5, constrained)]
    for request in requests:
        assert core.add(request) is None
    outputs = drain(core)
    assert wrong == []
    for request in requests:
        expected = fake_output(request.prompt_ids, 14 if request.key == 2 else 9)
        assert outputs[request.key] == expected
    assert grammars.matchers[1].consumed == outputs[1]
    assert core.pool.free == core.pool.total
    if kv_tokens == 28:
        assert core.stats().preemptions > 0
        return
    free = [2 in keys for keys in steps]
    first = free.index(True)
    assert all(free[first : first + 14])  # the free sequence is in every step, as if it were alone
    assert runner.most_in_flight == 2
