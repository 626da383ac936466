"""What parsing needs to know of models and lanes: cards, tokenizers, resumability, and the estimator."""

from collections.abc import Mapping

from inferry.dispatch.pool import Pool
from inferry.domain.clock import Clock
from inferry.domain.errors import NoWorker
from inferry.domain.jobs import Footprint
from inferry.domain.lanes import Lane, LanePolicy, evictable_lanes
from inferry.domain.ports import ModelCard, Tokenizer
from inferry.domain.routes import OutputLength
from inferry.prediction.estimator import Estimator

RETRY_AFTER_S = 2.0


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
        self.estimator = estimator
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
            if not all(view.models for view in self._pool.views()):
                raise NoWorker("some workers have not reported their models yet", retry_after_s=RETRY_AFTER_S)
        return card

    def tokenizer(self, model: str) -> Tokenizer | None:
        """The model's tokenizer, where every worker of the model takes its token ids."""
        return self._tokenizers.get(model)

    def share_tokenizer(self, adapter: str, model: str) -> None:
        """The adapter's prompts are tokenized as those of its base model."""
        if model in self._tokenizers:
            self._tokenizers[adapter] = self._tokenizers[model]

    def forget_tokenizer(self, adapter: str) -> None:
        self._tokenizers.pop(adapter, None)

    def max_wait_ms(self, lane: Lane) -> float:
        return self._max_wait_ms[lane]

    def ttft_allowance_s(self, lane: Lane, footprint: Footprint, ms_per_1k_tokens: int | None = None) -> float:
        """What the call's or the lane's `ttft_ms_per_1k_tokens` adds to the TTFT target for this prompt."""
        each_ms = self._lanes[lane].ttft_ms_per_1k_tokens if ms_per_1k_tokens is None else ms_per_1k_tokens
        return each_ms * footprint.prefill_tokens / 1e6

    def output_length(self, lane: Lane, expected_tokens: int) -> OutputLength | None:
        return self._lanes[lane].output_length(expected_tokens)

    def can_resume(self, card: ModelCard, lane: Lane) -> bool:
        """Whether a plain job of the lane is prepared to resume from its token ids: where that is free because the
        worker takes ids anyway, where another worker could resume it, or where jobs of the lane may be preempted.
        """
        return card.can_resume and (
            card.name in self._tokenizers or lane in self._preempted or self._pool.worker_count(card.name) > 1
        )
