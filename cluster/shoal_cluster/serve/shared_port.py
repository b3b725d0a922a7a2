"""Gateways of one application share their ports where they are on one node (SO_REUSEPORT); others are not to.

So the next version's gateway listens before Serve stops the former one, and no connection is refused in between.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Callable

import psutil

from shoal_cluster.addresses import listen
from shoal_replica.errors import ConfigError

ANY = {"0.0.0.0", "::"}
MAPPED = "::ffff:"  # gRPC listens at IPv4 addresses by IPv6


def check_not_taken(name: str, address: str, is_peer: Callable[[int], bool]) -> None:
    """Check that nobody listens at the address of setting ``name``, except peers.

    Args:
        is_peer: whether the process of that id is one.

    Raises:
        ConfigError: somebody does; names the processes, if this user may know them.
    """
    host, _, port = address.rpartition(":")
    pids = _listening(host.strip("[]"), int(port))
    others = sorted({pid or 0 for pid in pids if pid is None or not is_peer(pid)})
    if port == "0" or not others:
        return
    if len(others) == len(set(pids)):  # nobody shares it yet: the system knows whether these really have the address
        try:
            listen(address).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # binding it will tell
        else:
            return
    by = ", ".join(str(pid) if pid else "of another user or container" for pid in others)
    raise ConfigError(f"{name}: cannot listen on {address!r}: in use by process {by}")


def _listening(host: str, port: int) -> list[int | None]:
    """The processes that listen at a port of the host's address, or of all addresses; None for those of others."""
    try:
        own = {str(place[4][0]) for place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        own = set()
    sockets = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    return [
        each.pid
        for each in sockets
        if each.laddr and each.laddr.port == port and (own & ANY or each.laddr.ip.removeprefix(MAPPED) in own | ANY)
    ]


def is_other_gateway(application: str, deployment: str) -> Callable[[int], bool]:
    """Whether a process is another gateway of that application: a worker of this one's raylet, by its title."""
    name = re.escape(f"ray::ServeReplica:{application}:{deployment}")
    title = re.compile(rf"{name}(\.|::|\s|$)")  # followed by the method that runs, or by "::Exiting"
    own, raylet = os.getpid(), os.getppid()

    def is_peer(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return pid != own and process.ppid() == raylet and title.match(" ".join(process.cmdline())) is not None
        except psutil.Error:
            return False

    return is_peer
