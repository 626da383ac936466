"""Errors of the database as clients see them."""

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DataError, DBAPIError

from inferry.domain.errors import InvalidRequest, LedgerUnavailable
from inferry.domain.ledger import LedgerFileLost, LedgerUnusable

RETRY_AFTER_S = 2.0


@contextmanager
def as_client_errors() -> Iterator[None]:
    """Raises LedgerUnavailable, and InvalidRequest for a text or number that the database cannot hold."""
    try:
        yield
    except (LedgerFileLost, LedgerUnusable):
        raise LedgerUnavailable("the gateway's database is unavailable", retry_after_s=RETRY_AFTER_S) from None
    except DataError:
        # PostgreSQL stores no NUL character.
        raise InvalidRequest("an id or name contains a character that cannot be stored") from None
    except OverflowError:
        # SQLite's integers have 64 bits.
        raise InvalidRequest("a number is too large to be stored") from None
    except DBAPIError as error:
        # Its own text may quote a statement; the parameters are hidden by the engine.
        name = type(error.orig).__name__
        raise LedgerUnavailable(f"the gateway's database failed ({name})", retry_after_s=RETRY_AFTER_S) from error
