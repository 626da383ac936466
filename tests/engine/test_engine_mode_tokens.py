"""The four modes on one model: the same greedy tokens from each, in float32."""

import random
from pathlib import Path

import pytest

from inferry.domain.lanes import Lane
from inferry.domain.workers import EngineMode
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.messages import Request
from inferry.engine.runner import TorchRunner
from support.engine_fixtures import TIE, Teacher, drain, generate_alone, greedy, note, shortfall

MODES: tuple[EngineMode, ...] = ("continuous", "hybrid", "dynamic", "static")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("chunk_tokens", "kv_tokens"), [(4_096, 8_192), (48, 8_192), (64, 192)])
def test_greedy_tokens_of_every_mode_are_those_of_one_sequence_at_a_time(
    tiny_dir: Path, mode: EngineMode, chunk_tokens: int, kv_tokens: int
) -> None:
    rng = random.Random(chunk_tokens + kv_tokens)
    prompts = {key: [rng.randrange(7, 4_096) for _ in range(rng.randint(1, 70))] for key in range(10)}
    requests = {key: Request(key, prompt, greedy(rng.randint(1, 70)), Lane.P1) for key, prompt in prompts.items()}
    alone = generate_alone(tiny_dir, list(requests.values()))
    config = EngineConfig(mode=mode, max_sequences=4, kv_tokens=kv_tokens, chunk_tokens=chunk_tokens, block_tokens=8)
    core = EngineCore(TorchRunner.load(tiny_dir, config), config)
    outputs: dict[int, list[int]] = {}
    aborted = {3, 7}
    for key, request in requests.items():
        core.add(request)
        for _ in range(rng.randint(0, 2) if kv_tokens > 192 else 0):
            note(core.step(), outputs)
        if key - 1 in aborted:
            core.abort([key - 1])
    drain(core, outputs)
    assert core.pool.free == core.pool.total
    if kv_tokens == 192:
        assert core.stats().preemptions > 0
    teacher = Teacher(tiny_dir)
    for key, prompt in prompts.items():
        output = outputs.get(key, [])
        assert key in aborted or len(output) == len(alone[key])
        if output != alone[key][: len(output)]:
            assert shortfall(teacher.logits(prompt + output), prompt, output) < TIE
