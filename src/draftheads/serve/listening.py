"""The socket of the server. Imports nothing slow: a port that is taken is found before the model's libraries are."""

import socket

from draftheads.errors import InvalidSettings


def listen(host: str, port: int) -> socket.socket:
    """A listening socket."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)  # with SO_REUSEADDR
    except (OSError, OverflowError) as error:
        raise InvalidSettings(f"--host {host} --port {port}: cannot listen there ({error}); give another one") from None
