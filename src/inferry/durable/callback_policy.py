"""Where callbacks may go, and when they are retried. Pure.

A callback makes the gateway connect to an address that a tenant chose. Without these rules a tenant could reach what
only the gateway's own network may reach: metadata services, databases, engines.
"""

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import urlsplit

from msgspec import Struct

MAX_URL_CHARS = 2048
_DEFAULT_PORTS = {"https": 443, "http": 80}

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


class CallbackForbidden(Exception):
    """The policy forbids this URL or address. The message quotes neither."""


class CallbackPolicy(Struct, frozen=True, kw_only=True):
    """What an operator allows. Entries of host lists are names, or `*.NAME` for all names below one.

    `allowed_hosts` None: all. `allowed_networks` are exceptions from the internal networks that are forbidden;
    `denied_networks` have precedence over them.
    """

    allow_http: bool = False
    allowed_hosts: tuple[str, ...] | None = None
    denied_hosts: tuple[str, ...] = ()
    allowed_networks: tuple[Network, ...] = ()
    denied_networks: tuple[Network, ...] = ()
    timeout_s: float = 10.0
    initial_backoff_s: float = 5.0
    max_backoff_s: float = 3600.0
    retry_for_s: float = 86_400.0


class CallbackTarget(NamedTuple):
    """A URL that may be called, in parts. `path` includes the query."""

    is_https: bool
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS["https" if self.is_https else "http"] else f"{host}:{self.port}"


# The registries of special-purpose addresses (RFC 6890 and its updates). They are listed here because `is_global` of
# `ipaddress` differs between releases of Python.
_FORBIDDEN = tuple(
    ip_network(text)
    for text in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16"),
        *("192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        "168.63.129.16/32",  # Azure's metadata and DNS service: a public address that only its own hosts reach
        *("2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20"),
    )
)
_GLOBAL_IPV6 = ip_network("2000::/3")
_NAT64 = ip_network("64:ff9b::/96")


def parse_target(url: str, policy: CallbackPolicy) -> CallbackTarget:
    """The parts of a URL. Raises CallbackForbidden for a URL that is malformed or may not be called.

    A host that is an address is checked here; that of a name is checked when it is resolved.
    """
    if len(url) > MAX_URL_CHARS:
        raise CallbackForbidden(f"must have at most {MAX_URL_CHARS} characters")
    if not url.isascii() or any(char <= " " or char in '\x7f\\"<>^`{|}' for char in url):
        raise CallbackForbidden("must be a URL with percent-encoded characters and a punycode host")
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").removesuffix(".")
    except ValueError:
        raise CallbackForbidden("is not a URL: invalid host or port") from None
    if parts.scheme != "https" and not (parts.scheme == "http" and policy.allow_http):
        raise CallbackForbidden("must begin with https://" + (" or http://" if policy.allow_http else ""))
    if not host or "%" in host or "@" in parts.netloc or "#" in url or port == 0:
        raise CallbackForbidden("must have a host and a valid port, and no user name, password or fragment")
    if _matches(host, policy.denied_hosts) or not (
        policy.allowed_hosts is None or _matches(host, policy.allowed_hosts)
    ):
        raise CallbackForbidden("has a host that the operator of this gateway does not allow")
    try:
        address = ip_address(host)
    except ValueError:
        pass
    else:
        check_addresses([address], policy)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return CallbackTarget(parts.scheme == "https", host, port or _DEFAULT_PORTS[parts.scheme], path)


def check_addresses(addresses: Sequence[Address], policy: CallbackPolicy) -> None:
    """Raises CallbackForbidden unless every address of a host may be connected to."""
    for address in addresses:
        if any(not _is_allowed(one, policy) for one in _meanings(address)):
            raise CallbackForbidden("has an address that is internal, reserved or not allowed by the operator")


def _is_allowed(address: Address, policy: CallbackPolicy) -> bool:
    if _is_in(address, policy.denied_networks):
        return False
    return _is_in(address, policy.allowed_networks) or not _is_internal(address)


def _is_internal(address: Address) -> bool:
    if _is_in(address, _FORBIDDEN):
        return True
    return address.version == 6 and address not in _GLOBAL_IPV6 and address not in _NAT64


def _meanings(address: Address) -> list[Address]:
    """The addresses that a connection to this one may reach: itself, or the IPv4 address within, or both."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in _NAT64:
        return [address, IPv4Address(int(address) & 0xFFFF_FFFF)]
    return [address]


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _matches(host: str, patterns: Sequence[str]) -> bool:
    return any(host.endswith(one[1:]) if one.startswith("*.") else host == one for one in patterns)


def backoff_s(attempts: int, policy: CallbackPolicy, fraction: float) -> float:
    """Seconds until the next attempt after `attempts` failed ones: doubled each time, with `fraction` of half of it
    as jitter."""
    full_s = min(policy.initial_backoff_s * 2.0 ** min(attempts - 1, 60), policy.max_backoff_s)
    return full_s * (0.5 + 0.5 * fraction)
