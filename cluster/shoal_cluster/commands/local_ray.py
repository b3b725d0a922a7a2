"""A private Ray node on this machine: started, reached by its address, and stopped with everything that runs in it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from random import SystemRandom
from types import TracebackType

import psutil

from shoal_replica.errors import Unavailable

START_TIMEOUT_S = 180.0
STOP_GRACE_S = 3.0
LOG_LINES = 10
EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUAL_EPHEMERAL = 32_768
FIRST_PORT = 20_000  # Ray's workers use ports 10002 to 19999
SERVING_ENVIRONMENT = {  # of every node, as "On every node" in deploy/README.md explains
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_ROTATION_BACKUP_COUNT": "3",
    "RAY_ROTATION_MAX_BYTES": str(2**26),  # of a process's log, which would grow for ever
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**26),  # of a call, which carries its prompt's tokens; 4 MiB else
    # An update that has begun well goes on: Serve would replace no lost replica any more once it has lost a few.
    "RAY_SERVE_STOP_FAILED_ROLLING_UPDATES": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # at Ray's 15, replicas only get what other processes leave of the cores
}


class LocalRay:
    """One head node with its dashboard on loopback and its files in a temporary folder. Use it as a context manager.

    Args:
        num_cpus: logical CPUs that the node offers to actors; may exceed the machine's.
        resources: custom resources that it offers, by name.
    """

    def __init__(self, num_cpus: float, resources: Mapping[str, float] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="shoal-"))
        self.gcs_port, self.dashboard_port = free_ports(2)
        self.environment = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": os.environ.get("RAY_AUTH_TOKEN_PATH") or str(make_token(self.folder)),
            # At Serve's default of ten times a second, the control loop and the actors it polls take 1/8 of a core.
            "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": os.environ.get("RAY_SERVE_CONTROL_LOOP_INTERVAL_S", "0.5"),
            **SERVING_ENVIRONMENT,
        }
        self._log = self.folder / "ray-start.log"
        # The interpreter's own folder comes first: Ray starts its workers with the `python` that it finds in PATH.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += [f"--port={self.gcs_port}", f"--num-cpus={num_cpus:g}", f"--temp-dir={self.folder / 'ray'}"]
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={self.dashboard_port}", "--disable-usage-stats"]
        command += [f"--resources={json.dumps(dict(resources))}"] if resources else []
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **self.environment, "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    @property
    def address(self) -> str:
        """For ``ray.init(address=...)``."""
        return f"127.0.0.1:{self.gcs_port}"

    def wait_until_up(self) -> None:
        """Return when the dashboard answers.

        Raises:
            Unavailable: Ray has ended or did not come up in time; the message ends with the last lines of its log.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.dashboard_url}/api/version", timeout=2):
                    return
            except urllib.error.HTTPError:
                return  # it is up, if only to ask for the token
            except OSError:
                time.sleep(0.2)
        self.check()
        raise self._trouble(f"did not come up within {START_TIMEOUT_S:g} s")

    def check(self) -> None:
        """Raise Unavailable, with the last lines of its log, if Ray has ended."""
        if self._process.poll() is not None:
            raise self._trouble("has ended")

    def _trouble(self, what: str) -> Unavailable:
        said = self._log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return Unavailable("\n".join([f"Ray {what}; it said last:", *said]))  # the log goes with the folder

    def stop(self) -> None:
        """End Ray and every process it started, then remove its folder."""
        try:
            root = psutil.Process(self._process.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        if self._process.poll() is None:
            self._process.terminate()
        psutil.wait_procs(family, timeout=STOP_GRACE_S)
        for process in family:
            if process.is_running():
                process.kill()
        psutil.wait_procs(family, timeout=STOP_GRACE_S)
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def make_token(folder: Path) -> Path:
    """Create a token file for Ray's authentication, readable by this user alone."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def free_ports(count: int) -> list[int]:
    """Free loopback ports below the ephemeral range, if that leaves any, so that no outgoing connection is given one.

    They are bound only some time later, and a starting cluster opens connections by the hundred.
    """
    try:
        end = int(EPHEMERAL_RANGE.read_text().split()[0])
    except OSError:  # not Linux
        end = 0
    if end <= FIRST_PORT:
        end = USUAL_EPHEMERAL
    shuffled = SystemRandom().sample(range(FIRST_PORT, end), end - FIRST_PORT)
    return list(islice(filter(_is_free, shuffled), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
