"""Writes schemas.json: the arguments of the operators that we call, as unpacked torch_npu wheels register them.

    python tests/npu/record_schemas.py 2.10.0=FOLDER 2.13.0=FOLDER ...

Each FOLDER holds an unpacked wheel. Its library is searched for the schema's text; nothing is loaded.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

OPERATORS = (
    "npu_fused_infer_attention_score", "npu_scatter_pa_kv_cache", "npu_rms_norm", "npu_add_rms_norm", "npu_swiglu",
    "npu_mrope", "npu_rotary_mul", "npu_top_k_top_p", "npu_moe_gating_top_k_softmax", "npu_moe_init_routing_v2",
    "npu_grouped_matmul", "npu_moe_token_unpermute", "npu_dynamic_quant", "npu_quant_matmul",
)  # fmt: skip


def arguments(library: bytes, operator: str) -> list[str]:
    found = re.findall(rb"\0" + operator.encode() + rb"\(([^\0]*)\) -> [^\0]*\0", library)
    # The shortest is the functional form; others add outputs or gradients.
    text = min(found, key=len).decode()
    text = re.sub(r"\[[^\]]*\]", "", re.sub(r"\([a-z]!\)", "", text))
    parts = [part.strip() for part in text.split(",") if part.strip() != "*"]
    return [re.sub(r"=.*", "", part).split()[-1] for part in parts]


def main() -> None:
    schemas = {}
    for given in sys.argv[1:]:
        version, _, folder = given.partition("=")
        library = (Path(folder) / "torch_npu" / "lib" / "libtorch_npu.so").read_bytes()
        schemas[version] = {operator: arguments(library, operator) for operator in OPERATORS}
    text = json.dumps(schemas, indent=1)
    (Path(__file__).parent / "schemas.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
