"""One rank: connects to its engine, loads its shard, and computes steps until the engine stops it or is gone.

    python -m shoal_replica.ranks.worker < ADDRESS

ADDRESS is one line of JSON, a ``RankAddress``.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading

import msgspec

from shoal_replica.errors import ConfigError, ShoalError
from shoal_replica.ranks.channel import (
    Blocks,
    Done,
    EngineLink,
    Failed,
    Hello,
    Load,
    Pulse,
    RankAddress,
    ReadBlocks,
    Ready,
    Refused,
    Setup,
    Step,
    Unload,
    WriteBlocks,
)
from shoal_replica.ranks.runner import CollectiveError, RankRunner, Rendezvous, RunnerFactory

CONNECT_TIMEOUT_S = 30.0
PULSE_S = 0.5

logger = logging.getLogger(__name__)


def serve_rank(address: RankAddress, make_runner: RunnerFactory) -> None:
    """Run a rank until the engine stops it. Ends the process at once if the engine is gone.

    Raises:
        OSError: the engine cannot be reached.
        Exception: the error that ended the rank; the engine has been told of it.
    """
    listener = socket.create_server((address.rank_host, 0))
    link = EngineLink(address, CONNECT_TIMEOUT_S)
    port = listener.getsockname()[1]
    link.send(Hello(address.rank, address.key, os.getpid(), address.rank_host, port))
    heart = _Heart(link)
    heart.start()
    runner: RankRunner | None = None
    try:
        setup = link.receive()
        assert isinstance(setup, Setup)
        is_keeper = (setup.store_host, setup.store_port) == (address.rank_host, port)
        if not is_keeper:
            listener.close()
        ranks_here = tuple(rank for rank, host in enumerate(setup.hosts) if host == address.rank_host)
        own_listener = listener if is_keeper else None
        meeting = Rendezvous(setup.store_host, setup.store_port, address.rank_host, ranks_here, own_listener)
        runner = make_runner(setup.config, address.rank, meeting)
        heart.runner = runner
        link.send(Ready())
        _run(link, runner, heart)
    except ConnectionError:
        logger.error("rank %d ends: its engine is gone", address.rank)
    except CollectiveError as error:
        link.send(Failed("", str(error), is_secondary=True))
    except Exception as error:
        kind = type(error).__name__ if isinstance(error, ShoalError) else ""
        message = str(error) if kind else f"failed: {type(error).__name__}: {error}"
        link.send(Failed(kind, message, is_secondary=False))
        raise
    finally:
        try:
            heart.stop()  # before closing, as it reads the runner's progress
            if runner is not None:  # after the engine has been told, which closing may hinder or delay
                runner.close()
        finally:
            link.close()
            listener.close()


def _run(link: EngineLink, runner: RankRunner, heart: _Heart) -> None:
    """Do what the engine asks for, until it asks to stop."""
    while True:
        match link.receive():
            case Step(output, sampled):
                heart.begin(output.step)
                if not runner.samples:
                    runner.take_sampled(sampled)
                result = runner.execute(output)
                if runner.samples:
                    link.send(Done(output.step, result))
                heart.is_busy = False
            case Load(adapter):
                try:
                    runner.load_adapter(adapter)
                except ConfigError as error:
                    link.send(Refused(str(error)))
                else:
                    link.send(Ready())
            case Unload(name):
                runner.unload_adapter(name)
                link.send(Ready())
            case ReadBlocks(block_ids):
                try:
                    link.send(Blocks(runner.read_blocks(block_ids)))
                except ConfigError as error:
                    link.send(Refused(str(error)))
            case WriteBlocks(block_ids, part):
                try:
                    runner.write_blocks(block_ids, part)
                except ConfigError as error:
                    link.send(Refused(str(error)))
                else:
                    link.send(Ready())
            case _:
                return


class _Heart:
    """Sends the engine a pulse twice a second: this process is alive, and this is how far its model has got."""

    def __init__(self, link: EngineLink) -> None:
        self.runner: RankRunner | None = None
        self.is_busy = False
        self._step = 0
        self._link = link
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="shoal-rank-heart", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, step: int) -> None:
        self._step = step
        self.is_busy = True

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(PULSE_S)  # a thread that still runs at interpreter shutdown can crash it

    def _beat(self) -> None:
        while not self._stopped.wait(PULSE_S):
            try:
                self._link.send(self._pulse())
            except OSError:
                if not self._stopped.is_set():
                    os._exit(1)  # the engine is gone, and the model may hang waiting for a rank that is gone too

    def _pulse(self) -> Pulse:
        runner = self.runner
        if runner is None:
            return Pulse()
        return Pulse(self._step, runner.num_collectives, runner.progress, self.is_busy, runner.awaited_rank)


def main() -> None:
    from shoal_replica.model.rank_runner import DistributedRunner

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    serve_rank(msgspec.json.decode(sys.stdin.readline(), type=RankAddress), DistributedRunner)


if __name__ == "__main__":
    main()
