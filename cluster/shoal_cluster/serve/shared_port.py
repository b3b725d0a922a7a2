"""Gateways of one application share their ports where they are on one node (SO_REUSEPORT); others are not to.

So the next version's gateway listens before Serve stops the former one, and no connection is refused in between.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import psutil

from shoal_cluster.addresses import listen
from shoal_replica.errors import ConfigError


def check_not_taken(name: str, address: str, is_peer: Callable[[int], bool]) -> None:
    """Check that nobody listens at the address of setting ``name``, except peers.

    Args:
        is_peer: whether the process of that id is one.

    Raises:
        ConfigError: somebody does; names the processes, if this user may know them.
    """
    port = int(address.rpartition(":")[2])
    sockets = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    listening = [each.pid for each in sockets if each.laddr and each.laddr.port == port]
    others = sorted({pid or 0 for pid in listening if pid is None or not is_peer(pid)})
    if port == 0 or not others:
        return
    try:
        listen(address).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            by = ", ".join(str(pid) if pid else "of another user" for pid in others)
            raise ConfigError(f"{name}: cannot listen on {address!r}: in use by process {by}") from None


def is_other_gateway(application: str, deployment: str) -> Callable[[int], bool]:
    """Whether a process is another gateway of that application: a worker of this one's raylet, by its title."""
    title, own, raylet = f"ray::ServeReplica:{application}:{deployment}", os.getpid(), os.getppid()

    def is_peer(pid: int) -> bool:
        try:
            process = psutil.Process(pid)
            return pid != own and process.ppid() == raylet and " ".join(process.cmdline()).startswith(title)
        except psutil.Error:
            return False

    return is_peer
