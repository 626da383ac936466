"""What gateways that share limits hold of budget accounts, and the generation of their authority.

Every write names the generation under which the amounts were granted. `begin_rebuild` starts a new one: it waits for
writes under way, and later writes of the old generation are refused. What it returns therefore contains every amount
that any gateway may spend. One connection, used by one thread at a time.
"""

from collections.abc import Callable

from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.dialects.postgresql import Insert

from inferry.domain.shared_limits import Holding
from inferry.domain.spending import Spending
from inferry.ledger.schema import changes, holdings
from inferry.ledger.stores.opening import connect

_TOPIC = "limits"
_SELECT_GENERATION = select(changes.c.version).where(changes.c.of == _TOPIC)
_DELETE = delete(holdings).where(holdings.c.holder == bindparam("of"), holdings.c.account == bindparam("old"))
KEPT_S = 33 * 86_400.0
"""Holdings of dead gateways are kept for the longest period of a budget."""


class HoldingStore:
    """`read_spending` reads the spending of all accounts from the same database."""

    def __init__(self, url: str, read_spending: Callable[[], list[Spending]]) -> None:
        self._connector = connect(url, shared=True)
        self._read_spending = read_spending
        insert = self._connector.insert(holdings)
        values = {name: insert.excluded[name] for name in ("amount", "at")}
        self._upsert: Insert = insert.on_conflict_do_update(index_elements=["holder", "account"], set_=values)
        first = self._connector.insert(changes).values(of=_TOPIC, version=1)
        next_version = {"version": changes.c.version + 1}
        self._increment: Insert = first.on_conflict_do_update(index_elements=["of"], set_=next_version)

    def write(self, holder: str, generation: int, amounts: dict[str, int], at: float) -> int:
        """Write the amounts if the database has this generation; return the database's."""
        with self._connector.appending() as connection:
            # The lock of the row makes a rebuild wait for this transaction.
            current = _generation(connection, locked=True)
            if current == generation:
                kept = [(account, amount) for account, amount in amounts.items() if amount]
                rows = [{"holder": holder, "account": account, "amount": amount, "at": at} for account, amount in kept]
                if rows:
                    connection.execute(self._upsert, rows)
                gone = [{"of": holder, "old": account} for account, amount in amounts.items() if not amount]
                if gone:
                    connection.execute(_DELETE, gone)
            return current

    def read(self, holder: str) -> tuple[int, dict[str, int]]:
        """The generation, and what the gateway holds by account."""
        with self._connector.reading() as connection:
            rows = connection.execute(
                select(holdings.c.account, holdings.c.amount).where(holdings.c.holder == holder)
            ).all()
            return _generation(connection), {row.account: row.amount for row in rows}

    def begin_rebuild(self, now: float) -> tuple[int, list[Holding], list[Spending]]:
        """Start a new generation; return it, then what all gateways hold, and then what the ledger has.

        In this order: a gateway lowers its holding after its rows are in the ledger, so nothing is missed in between.
        """
        with self._connector.appending() as connection:
            connection.execute(self._increment)
            connection.execute(delete(holdings).where(holdings.c.at < now - KEPT_S))
            generation = _generation(connection)
        with self._connector.reading() as connection:
            rows = connection.execute(select(holdings.c.holder, holdings.c.account, holdings.c.amount)).all()
            held = [Holding(holder, account, amount) for holder, account, amount in rows]
        return generation, held, self._read_spending()

    def close(self) -> None:
        self._connector.close()


def _generation(connection: Connection, *, locked: bool = False) -> int:
    query = _SELECT_GENERATION.with_for_update(read=True) if locked else _SELECT_GENERATION
    return connection.execute(query).scalar() or 0
