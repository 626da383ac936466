"""Where callbacks may go: internal addresses are refused in every spelling."""

import ipaddress
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferry.durable.callback_policy import (
    Address,
    CallbackForbidden,
    CallbackPolicy,
    CallbackTarget,
    backoff_s,
    check_addresses,
    parse_target,
)

POLICY = CallbackPolicy()
HTTP = CallbackPolicy(allow_http=True)
INTERNAL = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.9.9.9"),
    *("169.254.169.254", "169.254.0.1", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.168.1.1"),
    *("198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1", "239.1.2.3", "240.0.0.1", "255.255.255.255"),
    "168.63.129.16",
    *("::", "::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:a00:1", "::127.0.0.1", "fe80::1", "fec0::1"),
    *("fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1", "2002:7f00:1::", "2001:0:4136::1"),
    *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "100::1", "3fff::1", "5f00::1"),
]
PUBLIC = ["1.1.1.1", "8.8.8.8", "172.32.0.1", "100.128.0.1", "223.255.255.254", "2606:4700::1111", "64:ff9b::101:101"]


def is_allowed(address: Address, policy: CallbackPolicy = POLICY) -> bool:
    try:
        check_addresses([address], policy)
    except CallbackForbidden:
        return False
    return True


@pytest.mark.parametrize("text", INTERNAL)
def test_an_internal_address_is_refused(text: str) -> None:
    assert not is_allowed(ip_address(text))
    with pytest.raises(CallbackForbidden):
        check_addresses([ip_address("1.1.1.1"), ip_address(text)], POLICY)


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_is_allowed(text: str) -> None:
    assert is_allowed(ip_address(text))


@given(st.ip_addresses())
def test_whatever_is_allowed_is_public_and_unicast(address: Address) -> None:
    if is_allowed(address):
        assert not address.is_multicast
        assert not address.is_loopback
        assert not address.is_link_local
        assert not address.is_unspecified
        assert address.is_global or address in ip_network("64:ff9b::/96")


@given(st.ip_addresses(v=4))
def test_an_ipv4_address_within_ipv6_counts_as_itself(address: IPv4Address) -> None:
    mapped = IPv6Address(b"\0" * 10 + b"\xff\xff" + address.packed)
    nat64 = IPv6Address(ip_network("64:ff9b::/96").network_address.packed[:12] + address.packed)
    assert is_allowed(mapped) == is_allowed(nat64) == is_allowed(address)
    assert not is_allowed(IPv6Address(b"\0" * 12 + address.packed)), "the deprecated compatible form"
    assert not is_allowed(IPv6Address(b"\x20\x02" + address.packed + b"\0" * 10)), "6to4"


@given(st.sampled_from([one for one in INTERNAL if "%" not in one]), st.integers(1, 20))
def test_a_network_is_allowed_by_the_operator_and_denied_before_that(text: str, bits: int) -> None:
    address = ip_address(text)
    inner = address.ipv4_mapped or address if isinstance(address, IPv6Address) else address
    if inner in ip_network("64:ff9b::/96"):
        inner = IPv4Address(int(inner) & 0xFFFF_FFFF)
    network = ip_network((inner, inner.max_prefixlen - bits), strict=False)
    assert is_allowed(address, CallbackPolicy(allowed_networks=(network,)))
    assert not is_allowed(address, CallbackPolicy(allowed_networks=(network,), denied_networks=(network,)))


def test_a_public_network_can_be_denied() -> None:
    assert not is_allowed(ip_address("8.8.8.8"), CallbackPolicy(denied_networks=(ip_network("8.8.0.0/16"),)))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://hooks.example.com/a?b=c", CallbackTarget(True, "hooks.example.com", 443, "/a?b=c")),
        ("https://Hooks.Example.com.:8443", CallbackTarget(True, "hooks.example.com", 8443, "/")),
        ("http://example.com/x", CallbackTarget(False, "example.com", 80, "/x")),
        ("https://[2606:4700::1111]/", CallbackTarget(True, "2606:4700::1111", 443, "/")),
    ],
)
def test_a_url_in_parts(url: str, target: CallbackTarget) -> None:
    assert parse_target(url, HTTP) == target


def test_the_host_header_names_the_port_where_it_is_not_the_usual_one() -> None:
    assert parse_target("https://a.example:8443/", POLICY).host_header == "a.example:8443"
    assert parse_target("https://a.example:443/", POLICY).host_header == "a.example"
    assert parse_target("http://a.example:443/", HTTP).host_header == "a.example:443"
    assert parse_target("https://[2606:4700::1111]/", POLICY).host_header == "[2606:4700::1111]"


@pytest.mark.parametrize(
    "url",
    [
        *("", "x", "/x", "//example.com/", "ftp://example.com/", "file:///etc/passwd", "https://", "https:///x"),
        *("http://example.com/", "HTTP://example.com/", "https://user@example.com/", "https://a:b@example.com/"),
        *("https://example.com/#f", "https://example.com:0/", "https://example.com:99999/", "https://example.com:x/"),
        *(
            "https://exa mple.com/",
            "https://example.com/\r\nx: y",
            "https://example.com\\@127.0.0.1/",
            "https://ex\u00e4.de/",
        ),
        *("https://[::1/", "https://127.0.0.1/", "https://[::ffff:10.0.0.1]/", "https://[fe80::1%25eth0]/"),
        *("https://169.254.169.254/latest/meta-data", "https://example.com/" + "a" * 2048, "https://%31%32%37.0.0.1/"),
    ],
)
def test_a_url_that_may_not_be_called(url: str) -> None:
    with pytest.raises(CallbackForbidden) as refused:
        parse_target(url, POLICY)
    assert len(url) < 8 or url not in str(refused.value)


@given(st.text(max_size=60))
def test_any_text_is_refused_or_gives_a_request_line_without_spaces(text: str) -> None:
    for url in (text, f"https://{text}", f"https://example.com/{text}", f"https://example.com:{text}"):
        try:
            target = parse_target(url, HTTP)
        except CallbackForbidden:
            continue
        shown = target.path + target.host_header
        assert shown.isascii()
        assert not any(char <= " " or char == "\x7f" for char in shown)
        assert target.path.startswith("/")


@pytest.mark.parametrize(
    ("allowed", "denied", "hosts"),
    [
        (("a.example",), (), {"a.example"}),
        (("*.a.example",), (), {"x.a.example", "y.x.a.example"}),
        (None, ("*.a.example", "evil.example"), {"a.example", "b.example"}),
        (("*.a.example",), ("x.a.example",), {"y.x.a.example"}),
        ((), (), set()),
    ],
)
def test_hosts_that_the_operator_allows(
    allowed: tuple[str, ...] | None, denied: tuple[str, ...], hosts: set[str]
) -> None:
    policy = CallbackPolicy(allowed_hosts=allowed, denied_hosts=denied)
    found = set()
    for host in ("a.example", "b.example", "evil.example", "nota.example", "x.a.example", "y.x.a.example"):
        try:
            found.add(parse_target(f"https://{host.upper()}./", policy).host)
        except CallbackForbidden:
            pass
    assert found == (hosts if allowed is not None else hosts | {"nota.example"})


def test_the_backoff_doubles_up_to_its_maximum_with_jitter() -> None:
    policy = CallbackPolicy(initial_backoff_s=2.0, max_backoff_s=60.0)
    assert [backoff_s(n, policy, 1.0) for n in range(1, 8)] == [2, 4, 8, 16, 32, 60, 60]
    assert [backoff_s(n, policy, 0.0) for n in (1, 2, 7)] == [1, 2, 30]
    assert backoff_s(10**6, policy, 0.5) == 45


def test_the_list_of_networks_is_at_least_that_of_python() -> None:
    private = ipaddress._IPv4Constants._private_networks  # type: ignore[attr-defined]
    assert not any(is_allowed(one) for network in private for one in (network[0], network[-1]))
