"""How a model writes tool calls and reasoning, as far as its chat template tells."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_replica.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written: each as a JSON object with ``name`` and ``arguments_key``.

    Attributes:
        opening: the text before a call, or before all of them if they are ``is_list``. Empty: an answer that begins
            with a call consists of calls.
        closing: the text after each call.
        is_list: the calls are a JSON array.
        id_length: characters of a call's id, if the template accepts no others.
    """

    name: str
    opening: str = ""
    closing: str = ""
    is_list: bool = False
    arguments_key: str = "arguments"
    id_length: int | None = None


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
"""Qwen2.5, Qwen3, Hermes. Calls in Qwen3-Coder's own notation are read, too."""

MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", is_list=True, id_length=9)
"""Mistral's instruction-tuned models; newer ones write ``name[ARGS]{...}``, which is read, too."""

LLAMA = CallFormat("llama", arguments_key="parameters")
"""Llama 3.1 to 3.3; ``<|python_tag|>`` may come first."""

THINK, END_OF_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
ARGS = "[ARGS]"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model's answers to chats are written.

    Attributes:
        takes_tools: the template shows tools to the model; else ``tool_prompt.py`` does, in the notation of HERMES.
        reasons: an answer may begin with reasoning, from THINK to END_OF_THINK.
    """

    calls: CallFormat
    takes_tools: bool
    reasons: bool

    @classmethod
    def of(cls, template: ChatTemplate | None) -> ChatFormat:
        """As ``template`` tells. A model whose notation is not known is read as one that writes plain JSON."""
        if template is None or not template.takes_tools:
            return cls(HERMES, takes_tools=False, reasons=template is not None and END_OF_THINK in template.source)
        calls = LLAMA
        if MISTRAL.opening in template.source:
            calls = MISTRAL
        elif HERMES.opening in template.source:
            calls = HERMES
        return cls(calls, takes_tools=True, reasons=END_OF_THINK in template.source)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that some models have as special tokens, and that must be read all the same."""
        return tuple(filter(None, (self.calls.opening, self.calls.closing, THINK, END_OF_THINK, PYTHON_TAG, ARGS)))
