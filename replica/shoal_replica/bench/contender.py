"""The contenders of a run (Shoal and its variants, the floor meter, the peers) and how their workers are started."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shoal_replica.bench import worker
from shoal_replica.bench.processor import usable_cores
from shoal_replica.bench.workloads import ALL_WORKLOADS, DEFAULT_WORKLOADS, check_workloads
from shoal_replica.errors import ConfigError

SHOAL = "shoal"
FLOOR = "floor"
NEEDS_FILE = ("openvino", "llamacpp")  # these read a GGUF file; the others read Shoal's model folder
PEER_WORKLOADS = {"vllm": "abcdefhi", "openvino": "abcdef", "llamacpp": "abcef", "transformers": "abcefhi"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A worker's name, command and environment, and the letters of the workloads that it takes part in.

    ``is_shoal``: it runs Shoal's engine, and so reports its model and its steps.
    """

    name: str
    command: tuple[str, ...]
    workloads: str
    environment: Mapping[str, str] = field(default_factory=dict)  # added to this process's
    is_shoal: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The contenders as given on the command line.

    Attributes:
        engine_options: ``KEY=VALUE``: arguments of ``LLM`` for Shoal and its variants.
        variants: ``NAME:KEY=VALUE``: Shoal again, as ``shoal-NAME``, with this argument added.
        peers: ``NAME=INTERPRETER[:MODEL_PATH]``.
        environment, options: ``NAME:KEY=VALUE``, for a peer.
        only: ``NAME:LETTERS``: the workloads of a peer or a variant.
    """

    engine_options: Sequence[str] = ()
    variants: Sequence[str] = ()
    peers: Sequence[str] = ()
    environment: Sequence[str] = ()
    options: Sequence[str] = ()
    only: Sequence[str] = ()


def make_contenders(model: str, num_threads: int, entries: Entries) -> list[Contender]:
    """The floor meter, Shoal, its variants, then the peers in the given order, all on the same cores.

    Args:
        model: a model folder; peers that read such folders get it unless they have a path of their own.

    Raises:
        ConfigError: fewer cores than threads, or an invalid name, interpreter, path or option.
    """
    cores = usable_cores(num_threads)
    if len(cores) < num_threads:
        raise ConfigError(f"--threads: got {num_threads}; this process may use {len(cores)} cores")
    settings = worker.Settings(model, num_threads, cores, _engine_options(entries.engine_options))
    labels = list(dict.fromkeys(text.partition(":")[0] for text in entries.variants))
    variants = {f"{SHOAL}-{k}": v for k, v in _grouped(entries.variants, "--variant", labels).items()}
    names = [text.partition("=")[0] for text in entries.peers]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--peer: there are two of {twice[0]!r}; add '-' and a label to one")
    environment = _grouped(entries.environment, "--peer-env", names)
    options = _grouped(entries.options, "--peer-option", names)
    only = _only(entries.only, [*variants, *names])
    return [
        _own(FLOOR, "floor_worker", "", settings),
        _own(SHOAL, "shoal_worker", ALL_WORKLOADS, settings),
        *(
            _own(name, "shoal_worker", only.get(name, DEFAULT_WORKLOADS), _with_options(settings, own_options))
            for name, own_options in variants.items()
        ),
        *(
            _peer(text, replace(settings, options=_typed(options[name])), environment[name], only.get(name))
            for text, name in zip(entries.peers, names, strict=True)
        ),
    ]


def _own(name: str, module: str, workloads: str, settings: worker.Settings) -> Contender:
    """A worker that is a module of this package, under this interpreter."""
    path = os.pathsep.join(p for p in sys.path if p)
    return Contender(
        name=name,
        command=(sys.executable, "-m", f"shoal_replica.bench.{module}", json.dumps(asdict(settings))),
        workloads=workloads,
        environment=_threads(settings) | {"PYTHONPATH": path},
        is_shoal=name != FLOOR,
    )


def _peer(text: str, settings: worker.Settings, environment: Mapping[str, str], workloads: str | None) -> Contender:
    """A peer from ``NAME=INTERPRETER[:MODEL_PATH]``. NAME is an adapter of ``worker.PEERS``, alone or followed by a
    hyphen and a label: ``llamacpp-q8_0``.
    """
    name, _, place = text.partition("=")
    interpreter, _, path = place.partition(":")
    adapter = name.partition("-")[0]
    if not interpreter:
        raise ConfigError(f"--peer: got {text!r}; must be NAME=INTERPRETER or NAME=INTERPRETER:MODEL_PATH")
    if adapter not in worker.PEERS:
        raise ConfigError(f"--peer: {name!r} is not one of {', '.join(worker.PEERS)} (or one of them, '-' and a label)")
    if shutil.which(interpreter) is None:
        raise ConfigError(f"--peer {name}: there is no interpreter {interpreter!r}")
    if not path and adapter in NEEDS_FILE:
        raise ConfigError(f"--peer {name}: {adapter} reads GGUF files; give {name}={interpreter}:FILE")
    if path and not Path(path).exists():
        raise ConfigError(f"--peer {name}: there is no file or folder {path!r}")
    return Contender(
        name=name,
        command=(
            interpreter,
            str(worker.__file__),
            adapter,
            json.dumps(asdict(replace(settings, model=path or settings.model))),
        ),
        workloads=workloads or PEER_WORKLOADS[adapter],
        environment=_threads(settings) | dict(environment),
    )


def _only(texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, _, letters = text.partition(":")
        if name not in names:
            raise ConfigError(f"--only: {name!r} is not one of the peers and variants ({_listed(names)})")
        found[name] = check_workloads(letters, f"--only {name}")
        if "s" in letters or ("g" in letters and not name.startswith(f"{SHOAL}-")):
            raise ConfigError(f"--only {name}: (s) is for {SHOAL!r} alone, (g) for it and its variants")
    return found


def _with_options(settings: worker.Settings, options: Mapping[str, str]) -> worker.Settings:
    return replace(settings, options=settings.options | _typed(options))


def _grouped(texts: Sequence[str], option: str, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """``NAME:KEY=VALUE`` settings, grouped by name.

    Raises:
        ConfigError: a setting is not of that form, or its name is not in ``names``.
    """
    groups: dict[str, dict[str, str]] = {name: {} for name in names}
    for text in texts:
        name, colon, setting = text.partition(":")
        key, equals, value = setting.partition("=")
        if not (colon and equals and key):
            raise ConfigError(f"{option}: got {text!r}; must be NAME:KEY=VALUE")
        if name not in groups:
            raise ConfigError(f"{option}: {name!r} is not one of the peers ({_listed(names)})")
        groups[name][key] = value
    return groups


def _typed(settings: Mapping[str, str]) -> dict[str, Any]:
    """Values parsed as JSON where possible, else kept as text: ``16`` is a number, ``int8`` a string."""
    return {key: _value(text) for key, text in settings.items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _threads(settings: worker.Settings) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(settings.num_threads), "TOKENIZERS_PARALLELISM": "false"}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none is given"


def _engine_options(texts: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` settings for Shoal's ``LLM``.

    Raises:
        ConfigError: a setting is not of that form.
    """
    pairs = [text.partition("=") for text in texts]
    if wrong := [key for key, equals, _ in pairs if not (key and equals)]:
        raise ConfigError(f"--engine-option: got {wrong[0]!r}; must be KEY=VALUE")
    return _typed({key: value for key, _, value in pairs})
