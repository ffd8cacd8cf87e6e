"""What several shapes have in common."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from undertow.engine.base.timestamps import ACCEPTED, parse_timestamp
from undertow.engine.search.metadata_index import Where

Kind = Literal["turn", "episode", "fact"]

MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "minLength": 1, "examples": ["user", "assistant", "system", "tool"]},
        "content": {
            "description": "Text, or content parts as OpenAI has them, of which the text is kept.",
            "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "object"}}],
        },
        "name": {"type": "string", "description": "Who speaks, where the role does not tell."},
        "timestamp": {"anyOf": [{"type": "string"}, {"type": "number"}], "description": ACCEPTED},
    },
}


def _moment(value: str | float) -> str:
    return parse_timestamp(value)


def _filters(value: dict[str, Any]) -> dict[str, Any]:
    Where.of(value)
    return value


Moment = Annotated[
    str | int | float, AfterValidator(_moment), Field(description=ACCEPTED, examples=["2026-05-08T13:56:00Z"])
]
MomentText = Annotated[str, AfterValidator(_moment), Field(description=ACCEPTED)]
Messages = Annotated[
    list[dict[str, Any]],
    WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA}),
    Field(description="Of one session, in their order. A user's message and the reply to it make one turn."),
]
Filters = Annotated[
    dict[str, Any],
    AfterValidator(_filters),
    Field(
        description="For each metadata key the value that a turn must have, or a list of which it must have "
        "one. An episode or a fact passes if a turn that it rests on does. Equal as in JSON: 1 is 1.0, and "
        'neither true nor "1".',
        examples=[{"topic": ["sailing", "work"], "rating": 5}],
    ),
]
Words = Annotated[str, Field(min_length=1, pattern=r"\S")]


class RequestModel(BaseModel):
    """What a request's body holds: a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid")


class ResponseModel(BaseModel):
    """What a response's body holds."""

    model_config = ConfigDict(extra="allow")
