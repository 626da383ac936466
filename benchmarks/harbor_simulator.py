"""Recorded seeds in the simulator, behind a gateway that estimates prefixes as the real one does.

The simulator's own gateway knows exactly what is cached, and its scheduler sees no prefixes. Here prompts are bytes:
the gateway's prefix memory names the prefixes, and the scheduler deducts what it expects to be cached. Three counts can
be compared: prompt tokens as the gateway expects them, as charged to a worker's capacity, and as computed by its
engine.
"""

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from inferry.domain.jobs import Estimate, Footprint, InferenceJob
from inferry.domain.lanes import DEFAULT_LANES, Lane
from inferry.domain.values import replace
from inferry.domain.workers import Capacity
from inferry.prediction.prefix_hits import PrefixHitModel
from inferry.sim.calls import Call
from inferry.sim.controlled_gateway import MAX_SEQUENCES, ControlledFrontend
from inferry.sim.costs import EngineModel, load_model
from inferry.sim.harbor import harbor
from inferry.sim.prompts import Piece
from inferry.sim.report import report
from inferry.sim.simulation import Simulation

MODEL = "m"
VOCABULARY = range(100, 4000)
"""Token ids of the load generator's prompts."""
_WORKER = "0"


class _PromptTexts:
    """Prompts as the load generator writes them: ids separated by a comma and a space. The bytes per token determine
    where the slices of the gateway's prefix memory end.
    """

    def __init__(self) -> None:
        self._segments: dict[int, tuple[Random, list[str]]] = {}

    def body(self, pieces: Sequence[Piece]) -> bytes:
        ids = ", ".join([one for piece in pieces for one in self._ids(*piece)])
        return f'{{"prompt": [{ids}]}}'.encode()

    def _ids(self, segment: int, start: int, count: int) -> list[str]:
        rng, known = self._segments.setdefault(segment, (Random(segment), []))
        known += [str(rng.choice(VOCABULARY)) for _ in range(start + count - len(known))]
        return known[start : start + count]


class PromptMemoryFrontend(ControlledFrontend):
    """`expected` and `charged` are prompt tokens by lane, of all calls that had their first token."""

    def __init__(self) -> None:
        super().__init__(DEFAULT_LANES)
        self.expected: Counter[Lane] = Counter()
        self.charged: Counter[Lane] = Counter()
        self._memory = PrefixHitModel()
        self._prompt_texts = _PromptTexts()

    def open(self, simulation: Simulation) -> None:
        super().open(simulation)
        for controller, engine in zip(self.controllers, simulation.engines, strict=True):
            # An engine behind HTTP does not report the tokens computed per step.
            controller.limit(Capacity(MAX_SEQUENCES, engine.flags.kv_tokens), chunk_tokens=None)

    def _offer(self, call: Call, job: InferenceJob, now: float) -> None:
        body = self._prompt_texts.body(call.step.prompt)
        matched = self._memory.match(call.run.tenant, MODEL, body)
        known = min(int(call.prompt * matched.share), call.prompt - 1)
        footprint = Footprint(job.footprint.prompt, Estimate(0, known, known), job.footprint.output)
        super()._offer(call, replace(job, footprint=footprint, prefix=matched.chain), now)

    def first_token(self, call: Call, now: float) -> None:
        lane = call.run.lane
        self.expected[lane] += self._open[call.job_id][1].job.footprint.prefill_tokens
        before = self.scheduler.use(_WORKER).prefill_tokens
        super().first_token(call, now)
        self.charged[lane] += before - self.scheduler.use(_WORKER).prefill_tokens


def simulate_seed(seed: int, frontend: ControlledFrontend, model: EngineModel | None = None) -> dict[str, Any]:
    """Attainment and wall time, with the recorded engine."""
    engine = model or load_model()
    simulation = Simulation(frontend, engine.costs, replace(engine.flags, policy="priority"))
    simulation.play(harbor(seed))
    result = report(simulation, "simulator")
    computed: Counter[Lane] = Counter()
    for row in simulation.rows:
        if row.ttft_s is not None:
            computed[row.lane] += row.prompt - row.cached
    figures: dict[str, Any] = {
        "seed": seed,
        "kept": {lane: round(one.attainment, 4) for lane, one in result.lanes.items()},
        "wall_s": round(result.wall_s, 1),
    }
    if isinstance(frontend, PromptMemoryFrontend):
        figures["computed_of_expected"] = {
            lane.name: round(computed[lane] / frontend.expected[lane], 3) for lane in Lane if frontend.expected[lane]
        }
        figures["computed_of_charged"] = {
            lane.name: round(computed[lane] / frontend.charged[lane], 3) for lane in Lane if frontend.charged[lane]
        }
    return figures
