"""What jobs are charged, and when: uncached prompt tokens when they are sent, put right when the worker has counted
them; output tokens as they are produced, or at the end."""

from inferry.domain.plans import Ended
from inferry.scheduling.tickets import Ticket

_REMEMBERED = 10_000


def prefilled(ticket: Ticket, tokens: int) -> None:
    """The prompt tokens that were really computed, where the worker says so."""
    if tokens != ticket.charged:
        ticket.run.charge(tokens - ticket.charged)
        ticket.charged = tokens


def produced(ticket: Ticket, tokens: int) -> None:
    ticket.produced += tokens
    ticket.run.charge(tokens)


def ended(ticket: Ticket, end: Ended) -> None:
    if end.prompt_tokens is not None:
        prefilled(ticket, max(0, end.prompt_tokens - (end.cached_tokens or 0)))
    if end.output_tokens is not None and end.output_tokens != ticket.produced:
        produced(ticket, end.output_tokens - ticket.produced)


class Past:
    """What tenants were served in accounts that are closed, up to ten thousand of them."""

    __slots__ = ("served",)

    def __init__(self) -> None:
        self.served: dict[str, int] = {}

    def remember(self, tenant: str, tokens: int) -> None:
        tokens += self.served.pop(tenant, 0)
        if len(self.served) >= _REMEMBERED:
            del self.served[next(iter(self.served))]
        self.served[tenant] = tokens
