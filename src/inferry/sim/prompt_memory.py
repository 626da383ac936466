"""What the simulated gateway knows of prompts, as the gateway does: what was sent before, and the names of prefixes.

Prompts have no bytes here, so slices are counted in tokens, at four bytes each.
"""

from typing import Final

from inferry.domain.jobs import Estimate, Footprint
from inferry.prediction.prefix_hits import LONG_SLICE_BYTES, SHORT_SLICES_BYTES, SLICE_BYTES, sparse_chain
from inferry.sim.calls import Call
from inferry.sim.gateway import OutputEstimator, capped_output, gateway_estimate
from inferry.sim.prompts import block_hashes

BYTES_PER_TOKEN: Final = 4
_SLICE_TOKENS: Final = SLICE_BYTES // BYTES_PER_TOKEN
_SHORT_SLICES: Final = SHORT_SLICES_BYTES // SLICE_BYTES
_SHORT_IN_LONG: Final = LONG_SLICE_BYTES // SLICE_BYTES


class PrefixAwareEstimator:
    """Estimates with prefix memory: prefixes that a tenant has sent before are expected to be cached on some engine.

    The scheduler deducts what it knows to be cached on the engine that it picks.
    """

    def __init__(self, output_of: OutputEstimator = capped_output) -> None:
        self._output_of = output_of
        self._sent: set[int] = set()

    def __call__(self, call: Call) -> Footprint:
        plain = gateway_estimate(call, self._output_of)
        chain = hash(call.run.tenant)
        tokens = cached = 0
        known = True
        for piece in call.step.prompt:
            chain = hash((chain, piece))
            tokens += piece[2]
            known = known and chain in self._sent
            if known:
                cached = tokens
            else:
                self._sent.add(chain)
        return Footprint(plain.prompt, Estimate.exactly(min(cached, call.prompt - 1)), plain.output)


class PromptPrefixes:
    """The prefix of every call, as `PrefixHitModel` names it. Equal runs give equal names in every process."""

    def __init__(self) -> None:
        self._salts: dict[str, int] = {}

    def __call__(self, call: Call) -> tuple[str, ...]:
        salt = self._salts.setdefault(call.run.tenant, len(self._salts) + 1)
        slices = block_hashes(call.step.prompt, _SLICE_TOKENS, salt)
        if len(slices) <= _SHORT_SLICES:
            return sparse_chain(slices)
        long_slices = slices[_SHORT_SLICES + _SHORT_IN_LONG - 1 :: _SHORT_IN_LONG]
        return sparse_chain((*slices[:_SHORT_SLICES], *long_slices))
