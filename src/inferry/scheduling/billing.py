"""What jobs are charged, and when: uncached prompt tokens when they are sent, put right when the worker has counted
them; output tokens as they are produced, or at the end."""

from collections.abc import Mapping

from inferry.domain.plans import Ended
from inferry.scheduling.tickets import Ticket

_REMEMBERED = 10_000


class Billing:
    """Charges accounts, and remembers what every tenant was served since the start, up to ten thousand of them."""

    __slots__ = ("_served",)

    def __init__(self) -> None:
        self._served: dict[str, int] = {}

    @property
    def served(self) -> Mapping[str, int]:
        return self._served

    def sent(self, ticket: Ticket) -> None:
        ticket.charged = ticket.prefill_tokens
        self._charge(ticket, ticket.charged)

    def prefilled(self, ticket: Ticket, tokens: int | None) -> None:
        """The prompt tokens that were really computed, where the worker says so."""
        if tokens is not None and tokens != ticket.charged:
            self._charge(ticket, tokens - ticket.charged)
            ticket.charged = tokens

    def produced(self, ticket: Ticket, tokens: int) -> None:
        ticket.produced += tokens
        self._charge(ticket, tokens)

    def ended(self, ticket: Ticket, end: Ended) -> None:
        if end.prompt_tokens is not None:
            self.prefilled(ticket, max(0, end.prompt_tokens - (end.cached_tokens or 0)))
        if end.output_tokens is not None and end.output_tokens != ticket.produced:
            self.produced(ticket, end.output_tokens - ticket.produced)

    def _charge(self, ticket: Ticket, tokens: int) -> None:
        ticket.run.charge(tokens)
        served, tenant = self._served, ticket.job.tenant
        if tenant in served:
            served[tenant] += tokens
        else:
            if len(served) >= _REMEMBERED:
                del served[next(iter(served))]
            served[tenant] = tokens
