"""An engine in a process of its own, driven by JSON lines: the request loop, and the adapters of the peer engines.

    INTERPRETER worker.py ADAPTER '{"model": PATH, "num_threads": 1, "cores": [0], "options": {}}'

This file is a stand-alone script: it runs under the interpreter where the peer is installed, and needs only that engine
and Python 3.10. It writes one line when the engine has produced its first token, or ``{"failed": ...}``. Then it
answers each line

    {"op": "generate", "prompts": [[token id, ...], ...], "max_tokens": n}

with ``{"seconds": s, "num_tokens": [n, ...]}``. Sampling is greedy and ignores end-of-sequence tokens. The process ends
when its standard input closes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

FIRST_PROMPT = list(range(100, 132))
KV_GIB = 2  # KV cache size, for engines that need one
MAX_LEN = 2048
MAX_BATCHED_TOKENS = 2048
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Settings:
    """How to load an engine. ``options`` are the engine's own options, by name."""

    model: str
    num_threads: int
    cores: list[int]
    options: dict[str, Any] = field(default_factory=dict)


class Missing(Exception):
    """A package is not installed for this interpreter."""


class Engine:
    """The interface of an adapter."""

    versions: dict[str, str]
    info: dict[str, Any]

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        """Generate ``max_tokens`` tokens for each prompt, all prompts in one batch: greedily, or drawn by
        ``temperature`` and ``top_p``, or by beam search with ``beam_width``.
        """
        raise NotImplementedError

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer one request. Only the call of the engine is timed."""
        if request["op"] != "generate":
            raise ValueError(f"no operation {request['op']!r}")
        started = time.perf_counter()
        outputs = self.generate(request["prompts"], request["max_tokens"], **request.get("how", {}))
        return {"seconds": time.perf_counter() - started, "num_tokens": [len(output) for output in outputs]}


class Vllm(Engine):
    """vLLM's offline ``LLM``, compiled, prefix cache on."""

    def __init__(self, settings: Settings) -> None:
        for name, value in (
            ("HF_HUB_OFFLINE", "1"),
            ("VLLM_LOGGING_LEVEL", "WARNING"),
            ("VLLM_NO_USAGE_STATS", "1"),
            ("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB)),
            ("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, settings.cores))),
        ):
            os.environ.setdefault(name, value)
        vllm = load("vllm")
        self.versions = {"vllm": vllm.__version__, "torch": load("torch").__version__}
        self.info = {"preload": os.environ.get("LD_PRELOAD", "")}
        self._params = vllm.SamplingParams
        self._beam_params = load("vllm.sampling_params").BeamSearchParams
        options = {
            "dtype": "bfloat16",
            "max_model_len": MAX_LEN,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
        }
        self._llm = vllm.LLM(settings.model, **(options | settings.options))

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        asked = [{"prompt_token_ids": p} for p in prompts]
        if "beam_width" in how:
            beams = self._llm.beam_search(asked, self._beam_params(max_tokens=max_tokens, ignore_eos=True, **how))
            return [list(b.sequences[0].tokens[len(p) :]) for b, p in zip(beams, prompts, strict=True)]
        common = {"max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
        outputs = self._llm.generate(asked, self._params(**{"temperature": 0} | how, **common), use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class OpenVino(Engine):
    """OpenVINO GenAI's ``ContinuousBatchingPipeline``, prefix cache on; ``options`` are device properties."""

    def __init__(self, settings: Settings) -> None:
        self._genai, self._openvino, self._numpy = load("openvino_genai"), load("openvino"), load("numpy")
        self.versions, self.info = {"openvino-genai": self._genai.__version__}, {}
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = KV_GIB
        scheduler.max_num_batched_tokens = MAX_BATCHED_TOKENS
        scheduler.max_num_seqs = 256
        properties = {"INFERENCE_NUM_THREADS": settings.num_threads, "ENABLE_CPU_PINNING": False} | settings.options
        self._pipeline = self._genai.ContinuousBatchingPipeline(settings.model, scheduler, "CPU", properties, {})

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        _only_greedy(how)
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = max_tokens
        config.ignore_eos, config.do_sample = True, False
        tensors = [self._openvino.Tensor(self._numpy.array([p], dtype=self._numpy.int64)) for p in prompts]
        return [list(r.m_generation_ids[0]) for r in self._pipeline.generate(tensors, [config] * len(tensors))]


class LlamaCpp(Engine):
    """llama.cpp's C interface through llama-cpp-python, used as in llama.cpp's batched example.

    Single sequences and batches have separate contexts. Caches are not unified (``kv_unified``), because in a unified
    one each sequence attends over all cells.
    """

    BATCH = 2048
    MAX_SEQS = 64

    def __init__(self, settings: Settings) -> None:
        self._api = api = load("llama_cpp")
        self._numpy = load("numpy")
        self.versions = {"llama-cpp-python": api.__version__}
        self._log = api.llama_log_callback(lambda *_: None)  # kept alive: C calls it
        api.llama_log_set(self._log, ctypes.c_void_p(0))
        api.llama_backend_init()
        self.info = {"system": api.llama_print_system_info().decode()}
        self._settings = settings
        self._model = api.llama_model_load_from_file(settings.model.encode(), api.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {settings.model}")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(self.BATCH, 0, 1)
        self._contexts: dict[int, Any] = {}

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        _only_greedy(how)
        context = self._context(1 if len(prompts) == 1 else self.MAX_SEQS)
        self._api.llama_memory_clear(self._api.llama_get_memory(context), False)
        rows = [(t, i, seq, i == len(p) - 1) for seq, p in enumerate(prompts) for i, t in enumerate(p)]
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(rows), self.BATCH):
            self._decode(context, rows[start : start + self.BATCH], outputs)
        for _ in range(max_tokens - 1):
            ends = [(outputs[s][-1], len(p) + len(outputs[s]) - 1, s, True) for s, p in enumerate(prompts)]
            self._decode(context, ends, outputs)
        return outputs

    def _context(self, num_seqs: int) -> Any:
        if num_seqs not in self._contexts:
            params = self._api.llama_context_default_params()
            params.n_seq_max, params.n_ctx = num_seqs, num_seqs * (MAX_LEN if num_seqs == 1 else 512)
            params.n_batch = self.BATCH
            params.n_threads = params.n_threads_batch = self._settings.num_threads
            params.kv_unified = False
            for name, value in self._settings.options.items():
                setattr(params, name, value)
            self._contexts[num_seqs] = self._api.llama_init_from_model(self._model, params)
        return self._contexts[num_seqs]

    def _decode(self, context: Any, rows: list[tuple[int, int, int, bool]], outputs: list[list[int]]) -> None:
        """Compute rows of (token, position, sequence, whether to sample); append sampled tokens to ``outputs``."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, samples) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, samples
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        if status := self._api.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode: status {status}")
        for i, (_, _, seq, samples) in enumerate(rows):
            if samples:
                logits = self._api.llama_get_logits_ith(context, i)
                outputs[seq].append(int(self._numpy.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax()))


class Transformers(Engine):
    """Hugging Face transformers' ``generate`` on one batch of prompts of equal length, bfloat16, SDPA."""

    def __init__(self, settings: Settings) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._torch, transformers = load("torch"), load("transformers")
        self._torch.set_num_threads(settings.num_threads)
        self.versions = {"transformers": transformers.__version__, "torch": self._torch.__version__}
        self.info = {}
        options = {"dtype": self._torch.bfloat16, "attn_implementation": "sdpa"} | settings.options
        self._model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, **options).eval()

    def generate(self, prompts: list[list[int]], max_tokens: int, **how: Any) -> list[list[int]]:
        width = how.pop("beam_width", 1)
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            output = self._model.generate(
                input_ids=ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                do_sample=bool(how),
                num_beams=width,
                pad_token_id=0,
                **({"top_k": 0} | how if how else {}),
            )
        return list(output[:, ids.shape[1] :].tolist())


def _only_greedy(how: dict[str, Any]) -> None:
    if how:
        raise ValueError(f"this adapter decodes greedily; asked for {', '.join(how)}")


PEERS: dict[str, Callable[[Settings], Engine]] = {
    "vllm": Vllm,
    "openvino": OpenVino,
    "llamacpp": LlamaCpp,
    "transformers": Transformers,
}


def load(package: str) -> Any:
    """Import a package by name. Raises Missing, with the name: it, or a package that it imports, is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise Missing(error.name or package) from error


def serve(make_engine: Callable[[Settings], Engine], settings: Settings) -> None:
    """Load an engine and answer requests until standard input closes.

    Standard input and output belong to the protocol; what libraries print goes to standard error.
    """
    requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if sys.platform == "linux":
        os.sched_setaffinity(0, settings.cores)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # while stopped, it cannot see its input close

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")

    try:
        engine = make_engine(settings)
        engine.generate([FIRST_PROMPT], 1)
    except Missing as error:
        say({"failed": f"package {error} is not installed there"})
        return
    except Exception as error:  # whatever an engine raises is reported, and ends this process
        say({"failed": f"{type(error).__name__}: {error}"})
        raise
    say({"ready": True, "versions": engine.versions | {"python": sys.version.split()[0]}, "info": engine.info})
    for line in requests:
        try:
            answer = engine.answer(json.loads(line))
        except Exception as error:  # as above
            say({"failed": f"{type(error).__name__}: {error}"})
            raise
        say(answer)


def main() -> None:
    adapter, settings = sys.argv[1:]
    serve(PEERS[adapter], Settings(**json.loads(settings)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # llama.cpp's and vLLM's cleanup at exit can hang or crash


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder: its modules must not shadow those of the engine
    main()
