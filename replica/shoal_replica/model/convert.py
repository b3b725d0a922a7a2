"""Turn a GGUF file into a bfloat16 Hugging Face checkpoint with tokenizer and chat template.

    python -m shoal_replica.model.convert GGUF_FILE OUT_DIR

The weights are those of the file, dequantised: as good as its quantisation, not better. OUT_DIR appears whole or not
at all. Needs the ``demo`` extra.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(gguf_file: Path, out_dir: Path) -> None:
    """Write the checkpoint to ``out_dir``, which must not exist or be empty."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        _forget_quantization(model)
        if not tokenizer.chat_template:
            tokenizer.chat_template = _chat_template(gguf_file)
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(out_dir)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _forget_quantization(model: Any) -> None:
    """The import leaves a note that the weights are packed, which the plain checkpoint must not carry."""
    config = model.config
    if hasattr(config, "quantization_config"):
        delattr(config, "quantization_config")
    model.hf_quantizer = None
    model.is_quantized = False


def _chat_template(gguf_file: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(gguf_file).get_field("tokenizer.chat_template")
    return None if field is None else str(field.contents())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m shoal_replica.model.convert", description=__doc__)
    parser.add_argument("gguf_file", type=Path)
    parser.add_argument("out_dir", type=Path)
    arguments = parser.parse_args()
    convert(arguments.gguf_file, arguments.out_dir)


if __name__ == "__main__":
    main()
