"""How OpenAI's API and vLLM's extensions say what an answer must match."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field

from shoal_cluster.serve.http.fields import Body, ListOf, Text, TextOrNull, Unsupported
from shoal_replica.errors import InvalidArgument
from shoal_replica.structured_output import LARK, REGEX, StructuredOutput


class JsonSchemaFormat(Body):
    name: TextOrNull = ""
    strict: bool | None = None  # answers match in either case
    json_schema: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """OpenAI's structured output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def structure(self) -> StructuredOutput | None:
        if self.type == "json_object":
            return StructuredOutput.json_object()
        if self.type == "json_schema":
            if self.json_schema is None:
                raise InvalidArgument("response_format.json_schema", None, "must be set")
            return StructuredOutput.json_schema(self.json_schema.json_schema)
        return None


class StructuredOutputs(Body):
    """vLLM's structured output. Its `grammar` is in Lark's notation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    json_form: Text | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Text | None = None
    choice: ListOf[Text] | None = None
    grammar: Text | None = None
    structural_tag: Unsupported = None
    disable_fallback: Any = None  # there is none
    disable_any_whitespace: Unsupported = None
    disable_additional_properties: Unsupported = None
    whitespace_pattern: Unsupported = None

    def structure(self) -> StructuredOutput | None:
        given = {
            **({} if self.json_form is None else {"json": StructuredOutput.json_schema(self.json_form)}),
            **({"json_object": StructuredOutput.json_object()} if self.json_object else {}),
            **({} if self.regex is None else {"regex": StructuredOutput(REGEX, self.regex)}),
            **({} if self.choice is None else {"choice": StructuredOutput.choice(self.choice)}),
            **({} if self.grammar is None else {"grammar": StructuredOutput(LARK, self.grammar)}),
        }
        if len(given) > 1:
            limit = "must have one of json, json_object, regex, choice and grammar"
            raise InvalidArgument("structured_outputs", [*given], limit)
        return next(iter(given.values()), None)
