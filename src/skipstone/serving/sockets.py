"""The socket of a server. It is bound before a model is loaded, so a busy port is reported at once."""

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that has a port of this machine and does not listen yet; port 0 takes a free one. OSError where the port is
    busy, or the address is none of this machine's."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise OSError(f"--host {host} is no address that this machine knows: {error.strerror}") from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        found.close()
        remedy = "end the program that listens there, or choose another --port (0 takes a free one)"
        raise OSError(f"cannot listen at {host}:{port} ({error.strerror}): {remedy}") from None
    return found


def url_of(bound: socket.socket) -> str:
    """Where clients of this machine find it."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
