"""Find a network interface of this host by its address."""

import fcntl
import socket
import struct

_SIOCGIFADDR = 0x8915
_NAME_BYTES = 256
_ADDRESS = slice(20, 24)


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an IPv4 address, or None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_NAME_BYTES}s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no such address
                continue
            if socket.inet_ntoa(answer[_ADDRESS]) == address:
                return name
    return None
