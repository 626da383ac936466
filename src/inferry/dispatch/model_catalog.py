"""Cards and tokenizers, by which calls are parsed, and what a parsed call gets from estimates, lanes and workers."""

from collections.abc import Mapping
from typing import Final

from inferry.dispatch.pool import Pool
from inferry.domain.callers import Caller
from inferry.domain.clock import Clock
from inferry.domain.errors import NoWorker
from inferry.domain.jobs import Estimate, Footprint
from inferry.domain.lanes import Lane, LanePolicy, evictable_lanes
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.routes import RouteKey
from inferry.prediction.estimator import Estimator

RETRY_AFTER_S: Final = 2.0
_NO_TOKENS: Final = Estimate.exactly(0)


class ResolvedCall:
    """What a job has from estimates, its lane and the workers. `can_resume` holds for a job without features."""

    def __init__(
        self,
        footprint: Footprint,
        prefix: tuple[str, ...],
        route: RouteKey,
        max_wait_s: float,
        ttft_allowance_s: float,
        can_resume: bool,
        is_batch: bool,
    ) -> None:
        self.footprint: Final = footprint
        self.prefix: Final = prefix
        self.route: Final = route
        self.max_wait_s: Final = max_wait_s
        self.ttft_allowance_s: Final = ttft_allowance_s
        self.can_resume: Final = can_resume
        self.is_batch: Final = is_batch


class ModelCatalog:
    """One object for all calls; it reads the pool, whose workers may change at any time."""

    def __init__(
        self,
        lanes: Mapping[Lane, LanePolicy],
        pool: Pool,
        tokenizers: dict[str, Tokenizer],
        estimator: Estimator,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._tokenizers = tokenizers  # shared with the owner: workers may be added later
        self.estimator: Final = estimator
        self.now = clock.now
        self.use_lanes(lanes)

    def use_lanes(self, lanes: Mapping[Lane, LanePolicy], tried: Mapping[Lane, LanePolicy] | None = None) -> None:
        """Follow other policies. A job's bound on holding is the longer one during a trial: its rules set the exact
        one."""
        self._max_wait_ms = {
            lane: policy.max_wait_ms if tried is None else max(policy.max_wait_ms, tried[lane].max_wait_ms)
            for lane, policy in lanes.items()
        }
        self._lanes = lanes
        self._preempted = evictable_lanes(lanes)
        self.policies = lanes, tried

    def cards(self, isolation: str | None = None) -> dict[str, ModelCard]:
        """The models of the shared workers, or of the pool of the tenant named. A tenant cannot tell models of other
        pools from models that do not exist.
        """
        return self._pool.cards(isolation)

    def card(self, name: str, isolation: str | None) -> ModelCard | None:
        """The model's card; None for a model that no worker serves. Raises NoWorker where that is not known yet."""
        card = self._pool.cards(isolation).get(name)
        if card is None:
            if isolation is not None and not self._pool.cards(isolation):
                raise NoWorker("the tenant's own pool has no workers", retry_after_s=RETRY_AFTER_S)
            views = self._pool.views()
            if not views:  # a gateway that shares workers has none until it knows their owner
                raise NoWorker("this gateway has no workers yet", retry_after_s=RETRY_AFTER_S)
            if not all(view.models for view in views):
                raise NoWorker("some workers have not reported their models yet", retry_after_s=RETRY_AFTER_S)
        return card

    def tokenizer(self, model: str) -> Tokenizer | None:
        """The model's tokenizer, where every worker of the model takes its token ids."""
        return self._tokenizers.get(model)

    def fingerprints(self, models: frozenset[str]) -> dict[str, str]:
        """Fingerprints of the tokenizers of these models, by model."""
        return {model: found.fingerprint for model, found in self._tokenizers.items() if model in models}

    def share_tokenizer(self, adapter: str, model: str) -> None:
        """The adapter's prompts are tokenized as those of its base model."""
        if model in self._tokenizers:
            self._tokenizers[adapter] = self._tokenizers[model]

    def forget_tokenizer(self, adapter: str) -> None:
        self._tokenizers.pop(adapter, None)

    def estimate_prompt(self, tenant: str, model: str, template: str | None, size: int) -> Estimate:
        """Prompt tokens of a body of `size` bytes."""
        return self.estimator.prompt(tenant, model, template, size)

    def resolve(
        self,
        caller: Caller,
        card: ModelCard,
        lane: Lane,
        prompt: Estimate,
        *,
        max_wait_ms: int | None,
        ttft_ms_per_1k: int | None,
        body: bytes | None = None,
        budget: int = 0,
        ignore_eos: bool = False,
        template: str | None = None,
        hint: int | None = None,
    ) -> ResolvedCall:
        """The lane's milliseconds apply where the call names none. A call without a body to estimate is pooled: it
        writes nothing, finds nothing cached and does not resume.
        """
        policy = self._lanes[lane]
        if body is not None:
            footprint, prefix = self.estimator.footprint(
                caller.tenant.name, card.name, body, prompt, budget, ignore_eos=ignore_eos, template=template, hint=hint
            )
            length, can_resume = policy.output_length(footprint.output.expected), self._can_resume(card, lane)
        else:
            footprint, prefix, length, can_resume = Footprint(prompt, _NO_TOKENS, _NO_TOKENS), (), None, False
        adapter = card.name if card.parent else None
        route = RouteKey(card.name, caller.precision, adapter, caller.pool, length=length, pooled=body is None)
        wait_ms = self._max_wait_ms[lane] if max_wait_ms is None else max_wait_ms
        each_ms = policy.ttft_ms_per_1k_tokens if ttft_ms_per_1k is None else ttft_ms_per_1k
        allowance_s = each_ms * footprint.prefill_tokens / 1e6
        return ResolvedCall(footprint, prefix, route, wait_ms / 1000, allowance_s, can_resume, not policy.is_live)

    def _can_resume(self, card: ModelCard, lane: Lane) -> bool:
        """Whether a plain job of the lane is prepared to resume from its token ids: where that is free because the
        worker takes ids anyway, where another worker could resume it, or where jobs of the lane may be preempted.
        """
        return card.can_resume and (
            card.name in self._tokenizers or lane in self._preempted or self._pool.worker_count(card.name) > 1
        )
