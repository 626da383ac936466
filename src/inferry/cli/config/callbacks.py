"""The `callbacks` section of the configuration: where callbacks of async jobs may go, and when they are retried."""

import re
import ssl
from collections.abc import Iterator
from ipaddress import ip_network

from msgspec import Struct

from inferry.cli.config.checks import check_positive
from inferry.durable.callback_policy import CallbackPolicy

_HOST = re.compile(r"(\*\.)?[a-z0-9_:]([a-z0-9_.:-]*[a-z0-9_:])?")


class CallbacksConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Callbacks of async jobs. Internal addresses are always refused, except `allowed_networks`."""

    allow_http: bool = False
    """Whether callbacks may go to `http://` as well as to `https://`."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts that callbacks may go to: names, or `*.example.com` for all names below one; null allows all, `[]` none."""
    denied_hosts: tuple[str, ...] = ()
    """Hosts that callbacks may not go to, written as `allowed_hosts`."""
    allowed_networks: tuple[str, ...] = ()
    """Internal networks that callbacks may go to, for example `10.2.0.0/16`."""
    denied_networks: tuple[str, ...] = ()
    """Networks that callbacks may not go to, also within `allowed_networks`."""
    ca_file: str | None = None
    """A PEM file of certificate authorities for receivers; null uses those of the operating system."""
    timeout_s: float = 10.0
    """Maximum time of one attempt, from the resolution of the host to the head of the response, in seconds."""
    initial_backoff_s: float = 5.0
    """Seconds between the first attempt and the second, before jitter. The time doubles with every attempt."""
    max_backoff_s: float = 3600.0
    """Maximum time between two attempts, in seconds."""
    retry_for_s: float = 86_400.0
    """How long after the end of its job a callback is retried, in seconds. It is marked as failed after that."""

    def policy(self) -> CallbackPolicy:
        names = [name for name in CallbackPolicy.__struct_fields__ if not name.endswith("_networks")]
        return CallbackPolicy(
            **{name: getattr(self, name) for name in names},
            allowed_networks=tuple(map(ip_network, self.allowed_networks)),
            denied_networks=tuple(map(ip_network, self.denied_networks)),
        )

    def tls(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca_file)


def check_callbacks(config: CallbacksConfig, job_ttl_s: float | None) -> Iterator[str]:
    yield from check_positive("callbacks", config, "timeout_s", "initial_backoff_s", "max_backoff_s", "retry_for_s")
    if config.max_backoff_s < config.initial_backoff_s:
        yield f"callbacks.max_backoff_s ({config.max_backoff_s:g}) is shorter than callbacks.initial_backoff_s"
    if job_ttl_s is not None and config.retry_for_s > job_ttl_s:
        yield (
            f"callbacks.retry_for_s ({config.retry_for_s:g}) is longer than storage.job_ttl_s ({job_ttl_s:g}), after "
            "which the job is deleted"
        )
    for name in ("allowed_hosts", "denied_hosts"):
        for index, host in enumerate(getattr(config, name) or ()):
            if not _HOST.fullmatch(host):
                yield f"callbacks.{name}[{index}] must be a host in lower case, or `*.` and a domain"
    for name in ("allowed_networks", "denied_networks"):
        for index, network in enumerate(getattr(config, name)):
            try:
                ip_network(network)
            except ValueError:
                yield f"callbacks.{name}[{index}] must be a network, for example 10.2.0.0/16"
    if config.ca_file is not None:
        try:
            config.tls()
        except OSError:
            yield "callbacks.ca_file cannot be read or has no certificates"
