"""The socket of a server. It is bound before a model is loaded, so a busy port is reported at once."""

import socket

UNREAD_TIMEOUT_SECONDS = 600
"""Time after which the kernel closes a connection whose client reads nothing of its answer. It would stay open for ever."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket with a port of this machine that does not listen yet; port 0 takes a free one. OSError if the port is busy or
    the address is not this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"--host {host} is no address that this machine knows: {error.strerror}") from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if (option := getattr(socket, "TCP_USER_TIMEOUT", None)) is not None:  # Linux; connections inherit it
            found.setsockopt(socket.IPPROTO_TCP, option, 1000 * UNREAD_TIMEOUT_SECONDS)
        found.bind(address)
    except OSError as error:
        found.close()
        remedy = "end the program that listens there, or choose another --port (0 takes a free one)"
        raise OSError(f"cannot listen at {host}:{port} ({error.strerror}): {remedy}") from None
    return found


def url_of(bound: socket.socket) -> str:
    """The URL for clients of this machine."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
