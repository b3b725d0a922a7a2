"""How a model writes tool calls and reasoning, as far as its chat template tells."""

from __future__ import annotations

from dataclasses import dataclass

from shoal_cluster.chat.xml_call import GLM_XML, MINIMAX_XML, QWEN_XML, XmlNotation
from shoal_replica.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written: each as a JSON object with ``name`` and ``arguments_key``.

    Attributes:
        opening: the text before a call, or before all of them if they are ``is_list``. Empty: an answer that begins
            with a call consists of calls.
        closing: the text after each call.
        is_list: the calls are a JSON array.
        is_xml: the calls are tagged instead, and may come without ``opening`` if they begin with a tag.
        xml: how tagged calls are read, also among others that have a ``closing``.
        id_length: characters of a call's id, if the template accepts no others.
    """

    name: str
    opening: str = ""
    closing: str = ""
    is_list: bool = False
    is_xml: bool = False
    xml: XmlNotation = QWEN_XML
    arguments_key: str = "arguments"
    id_length: int | None = None

    @property
    def openings(self) -> tuple[str, ...]:
        """All texts by which calls begin within an answer."""
        return tuple(filter(None, (self.opening, self.xml.head_start if self.is_xml else "")))


HERMES = CallFormat("hermes", "<tool_call>", "</tool_call>")
"""Qwen2.5, Qwen3, Hermes. Calls in Qwen3-Coder's notation are read, too."""

QWEN_CODER = CallFormat("qwen3_coder", "<tool_call>", "</tool_call>", is_xml=True)
"""Qwen3-Coder. Calls as JSON are read, too, and enforced ones are written so."""

GLM = CallFormat("glm", "<tool_call>", "</tool_call>", is_xml=True, xml=GLM_XML)
MINIMAX = CallFormat("minimax", "<minimax:tool_call>", "</minimax:tool_call>", is_xml=True, xml=MINIMAX_XML)
"""As with Qwen3-Coder, enforced calls are JSON."""

MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", is_list=True, id_length=9)
"""Mistral's instruction-tuned models. Newer ones write ``name[ARGS]{...}``, which is read, too."""

LLAMA = CallFormat("llama", arguments_key="parameters")
"""Llama 3.1 to 3.3; ``<|python_tag|>`` may come first."""

THINK, END_OF_THINK = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model's answers to chats are written.

    Attributes:
        takes_tools: the template shows tools to the model; else ``tool_prompt.py`` does, in the notation of HERMES.
        reasons: an answer may begin with reasoning, from THINK to END_OF_THINK.
        parallel: a turn may have several calls; some templates refuse those.
    """

    calls: CallFormat
    takes_tools: bool
    reasons: bool
    parallel: bool = True

    @classmethod
    def of(cls, template: ChatTemplate | None) -> ChatFormat:
        """As ``template`` tells. A model whose notation is not known is read as one that writes plain JSON."""
        source = "" if template is None else template.source
        reasons = END_OF_THINK in source
        if template is None or not template.takes_tools:
            return cls(HERMES, takes_tools=False, reasons=reasons)
        calls = LLAMA
        if MISTRAL.opening in source:
            calls = MISTRAL
        elif MINIMAX.opening in source:
            calls = MINIMAX
        elif HERMES.opening in source:
            calls = HERMES
            for tagged in (GLM, QWEN_CODER):
                if (tagged.xml.head_start or tagged.xml.parameter_start) in source:
                    calls = tagged
        return cls(calls, takes_tools=True, reasons=reasons, parallel="single tool-call" not in source)

    @property
    def call_markers(self) -> tuple[str, ...]:
        """Texts around calls that some models have as special tokens, and that must be read all the same."""
        tags = self.calls.xml.tags if self.calls.is_xml else ()
        return tuple(filter(None, (self.calls.opening, self.calls.closing, PYTHON_TAG, ARGS, CALL_ID, *tags)))
