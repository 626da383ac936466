"""Builders and references for tests of the embedded engine."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from inferry.domain.jobs import Estimate, Footprint, InferenceJob, Payload
from inferry.domain.lanes import Lane, ReleaseReason
from inferry.domain.plans import BatchPlan
from inferry.domain.routes import BatchKey, RouteKey
from inferry.domain.sampling import Sampling
from inferry.engine.config import EngineConfig
from inferry.engine.core import EngineCore
from inferry.engine.loader import load_model
from inferry.engine.messages import Request, StepDone
from inferry.engine.model import Decoder
from inferry.engine.planner import Work
from inferry.engine.runner import TorchRunner
from inferry.engine.step_batch import PromptChunk, StepBatch

TIE = 1e-4
"""Two tokens whose logits are closer than this are both the best."""


def greedy(max_tokens: int = 16, *, stop: tuple[str, ...] = (), ignore_eos: bool = True) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=max_tokens, stop=stop, ignore_eos=ignore_eos)


def a_job(
    job_id: str, prompt_ids: Sequence[int], *, sampling: Sampling | None = None, lane: Lane = Lane.P1
) -> InferenceJob:
    sampling = sampling or greedy()
    route = RouteKey("tiny")
    counts = (len(prompt_ids), 0, sampling.max_tokens)
    return InferenceJob(
        job_id=job_id,
        tenant="tenant",
        run_id=f"run-of-{job_id}",
        step_id=f"step-of-{job_id}",
        lane=lane,
        is_batch=lane is Lane.P2,
        route=route,
        batch_key=BatchKey(route),
        footprint=Footprint(*map(Estimate.exactly, counts)),
        token_budget=sampling.max_tokens,
        prompt_hash="",
        arrived_at=0.0,
        max_wait_s=0.0,
        payload=Payload(api="completions", body=b"", sampling=sampling, prompt_ids=tuple(prompt_ids)),
    )


def a_plan(*jobs: InferenceJob, plan_id: int = 1) -> BatchPlan:
    return BatchPlan(plan_id=plan_id, worker="embedded", jobs=jobs, reason=ReleaseReason.IMMEDIATE, formed_at=0.0)


class FakeRunner:
    """A model without arithmetic whose next token depends on every cell of its KV cache that it should see.

    Cells are written and read through the sequence's blocks, so that a block given to two sequences, lost or not
    recomputed shows in the tokens.
    """

    def __init__(self, config: EngineConfig, *, context_tokens: int = 1_000, eos_ids: frozenset[int] = frozenset()):
        self.context_tokens = context_tokens
        self.vocab_size = 100
        self.eos_ids = eos_ids
        self._size = config.block_tokens
        self._cells = dict.fromkeys(range(config.cache_blocks * config.block_tokens), 0)
        self.before: Callable[[Sequence[Work]], None] = lambda work: None

    def execute(self, work: Sequence[Work]) -> list[int]:
        self.before(work)
        sampled: list[int] = []
        for piece in work:
            sequence = piece.sequence
            end = sequence.computed + piece.tokens
            for at in range(sequence.computed, end):
                self._cells[self._cell(sequence.blocks, at)] = sequence.tokens[at]
            if end == len(sequence.tokens):
                sampled.append(next_fake_token([self._cells[self._cell(sequence.blocks, at)] for at in range(end)]))
        return sampled

    def _cell(self, blocks: list[int], at: int) -> int:
        return blocks[at // self._size] * self._size + at % self._size


def next_fake_token(tokens: Sequence[int]) -> int:
    return sum((place + 1) * token for place, token in enumerate(tokens)) % 97


def fake_output(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_fake_token(tokens))
    return tokens[len(prompt) :]


def drain(core: EngineCore, outputs: dict[int, list[int]] | None = None) -> dict[int, list[int]]:
    """Step until nothing is left; all tokens by key."""
    outputs = {} if outputs is None else outputs
    while core.has_work:
        note(core.step(), outputs)
    return outputs


def note(step: StepDone, outputs: dict[int, list[int]]) -> None:
    for key, token in step.tokens:
        outputs.setdefault(key, []).append(token)


def generate(model_dir: Path, requests: Sequence[Request], config: EngineConfig | None = None) -> dict[int, list[int]]:
    """What a fresh engine makes of the requests, all at once."""
    config = config or EngineConfig()
    core = EngineCore(TorchRunner.load(model_dir, config), config)
    for request in requests:
        assert core.add(request) is None
    outputs = drain(core)
    assert core.pool.free == core.pool.total
    return outputs


def generate_alone(model_dir: Path, requests: Sequence[Request]) -> dict[int, list[int]]:
    """What one engine makes of the requests, one after another."""
    config = EngineConfig(max_sequences=1, kv_tokens=2_048)
    core = EngineCore(TorchRunner.load(model_dir, config), config)
    outputs: dict[int, list[int]] = {}
    for request in requests:
        assert core.add(request) is None
        drain(core, outputs)
    return outputs


class Teacher:
    """Logits of whole sequences in one pass without batching or paging: what every other way is compared with."""

    def __init__(self, model_dir: Path) -> None:
        self._config, self._weights = load_model(model_dir)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        rows = len(tokens)
        decoder = Decoder(self._config, self._weights, blocks=1, block_tokens=rows)
        every = torch.arange(rows)
        slots = (torch.arange(self._config.tiles) * rows + every.unsqueeze(1)).view(-1)
        chunk = PromptChunk(0, rows, rows, None, None)
        return decoder.forward(StepBatch(torch.tensor(list(tokens)), every, slots, None, (chunk,), None))


def shortfall(logits: torch.Tensor, prompt: Sequence[int], output: Sequence[int]) -> float:
    """How far below the best the worst chosen token is, when the teacher is forced along the output."""
    rows = logits[len(prompt) - 1 : len(prompt) + len(output) - 1]
    chosen = rows.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
    return float((rows.max(dim=1).values - chosen).max())
