"""A scripted worker that also embeds, scores and classifies."""

from msgspec.structs import replace

from inferry.domain.jobs import InferenceJob
from inferry.domain.pooling import Classification, PooledResult, encode_answer, encode_vector
from inferry.domain.ports import Emit, ModelCard
from inferry.domain.routes import ALL_TASKS
from inferry.domain.streams import Delta, Done, FinishReason, Usage
from support.scripted_worker import ScriptedWorker

_RESULTS: dict[str, PooledResult] = {
    "embeddings": encode_vector([1.0, 0.0]),
    "score": 0.5,
    "classify": Classification("high", [0.25, 0.75]),
}
PROMPT_TOKENS = 4


class PoolingWorker(ScriptedWorker):
    """Gives every input of a pooled job the same result, once its gate is open. A pooled job has four prompt tokens."""

    def cards(self) -> list[ModelCard]:
        return [replace(card, tasks=ALL_TASKS) for card in super().cards()]

    async def _generate(self, job: InferenceJob, emit: Emit) -> None:
        inputs = job.payload.pooled
        if inputs is None:
            await super()._generate(job, emit)
            return
        await self.gate.wait()
        raw = encode_answer([_RESULTS[job.payload.api]] * inputs.count, PROMPT_TOKENS)
        emit(Delta(job.job_id, job.run_id, job.step_id, 0, raw=raw, is_last=True))
        emit(Done(job.job_id, FinishReason.STOP, Usage(prompt_tokens=PROMPT_TOKENS)))
