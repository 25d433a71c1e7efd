"""IP addresses: trusted proxies, the client that a proxy names, and which addresses count as one client."""

import ipaddress
import re
from collections.abc import Sequence

from ..errors import InputError, format_value

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def parse_networks(texts: Sequence[str]) -> Networks:
    """Parses networks such as 10.0.0.0/24. An address is a network of one. Raises InputError for the network
    of all addresses.
    """
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text))
        except ValueError as error:
            remedy = "give an IP address, or a network such as 10.0.0.0/24"
            raise InputError(
                f"{format_value(text)} is not an address of a proxy ({error}): {remedy}"
            ) from error
        if not found[-1].prefixlen:
            raise InputError(f"{format_value(text)} would trust every address: give the proxy's own")
    return tuple(found)


def is_within(host: str, trusted: Networks) -> bool:
    """Returns True if a peer's address lies in one of the networks."""
    if not trusted:
        return False
    try:
        return _is_trusted(_peer_address(host), trusted)
    except ValueError:
        return False


def address_group(host: str) -> str:
    """Returns the name under which an address is counted. For IPv6 it is the /64, which one host often has as
    a whole.
    """
    try:
        address = _peer_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network((address, 64), strict=False) if address.version == 6 else address)


def forwarded_client(peer: str, headers: Sequence[str], trusted: Networks) -> str:
    """Returns the client behind a trusted proxy: the right-most address in `X-Forwarded-For` that is no such
    proxy, or the peer. The client itself may have written whatever is to the left of it.
    """
    client = peer
    for text in reversed(",".join(headers).split(",") if headers else []):
        try:
            address = _parse_address(text.strip())
        except ValueError as error:
            raise InputError(
                f"x-forwarded-for has {format_value(text)}, which is no IP address: send an address"
            ) from error
        client = str(address)
        if not _is_trusted(address, trusted):
            break
    return client


def _parse_address(text: str) -> _Address:
    """Parses 10.0.0.7, 10.0.0.7:80, ::1, [::1] or [::1]:80."""
    host = text
    port = ":0"
    if text.startswith("["):
        host, end, port = text[1:].partition("]")
        port = port or end and ":0"
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
        port = f":{port}"
    if "%" in host or not re.fullmatch(":[0-9]{1,5}", port):
        raise ValueError(text)
    address = ipaddress.ip_address(host)
    return getattr(address, "ipv4_mapped", None) or address


def _peer_address(host: str) -> _Address:
    """Returns the address of a host, also of a text like fe80::1%eth0."""
    return _parse_address(host.partition("%")[0])


def _is_trusted(address: _Address, trusted: Networks) -> bool:
    return any(address in network for network in trusted)
