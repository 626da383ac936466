"""500 sequences in a KV cache for 50: all end, with their own tokens, in every mode."""

import pytest

from benchmarks.engine_gpu_pressure import MODES, finish, pressed, some_requests
from inferry.domain.workers import EngineMode
from inferry.engine.core import EngineCore
from support.engine_fixtures import FakeRunner, fake_output


@pytest.mark.parametrize("mode", MODES)
def test_ten_times_the_sequences_that_fit_end_with_their_own_tokens(mode: EngineMode) -> None:
    requests = some_requests(500, 97, (1, 20), (1, 60))
    config = pressed(mode, requests, 50, chunk_tokens=64, block_tokens=4)
    core = EngineCore(FakeRunner(config), config)
    outputs = finish(core, requests)
    assert core.stats().preemptions > 0
    for request in requests:
        assert outputs[request.key] == fake_output(request.prompt_ids, request.sampling.max_tokens)
