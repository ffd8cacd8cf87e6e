"""What the consumer needs of a stream: read as a member of a group, acknowledge, set messages aside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from undertow.engine.base.model import BadInput, UndertowError

NO_VALUE = ("has no value", "Send a JSON object of the messages format.")


class StreamError(UndertowError):
    """The stream cannot be read or written, and waiting would not help."""


class Unavailable(UndertowError):
    """A server of the stream does not answer now. Try again."""


class Delivery(NamedTuple):
    """One message as it was delivered.

    `place`: where it stands, such as TOPIC/PARTITION/OFFSET; the same in each delivery of it. `tenant`: whose
    it is by its envelope. `problem`: why its envelope cannot be read. `raw`: the message in the client
    library's form.
    """

    place: str
    tenant: str | None
    value: bytes
    problem: BadInput | None
    raw: Any


class Letter(NamedTuple):
    """A message that is set aside, and why."""

    delivery: Delivery
    problem: BadInput


class Source(ABC):
    """One member of a consumer group. Used by one thread.

    Every method may raise Unavailable: nothing is lost, and the call can be repeated. StreamError.
    """

    name: str

    @abstractmethod
    def read(self, most: int, wait_s: float) -> list[Delivery]:
        """At most so many messages, in order within what the stream orders. Waits if there is none."""

    @abstractmethod
    def hold(self) -> None:
        """Stay in the group without taking messages; to be called again and again until `resume`."""

    @abstractmethod
    def resume(self) -> None:
        """Take messages again."""

    @abstractmethod
    def bury(self, letters: Sequence[Letter]) -> None:
        """Write to the dead-letter stream; acknowledged there on return. A repeated call writes again."""

    @abstractmethod
    def commit(self, batch: Sequence[Delivery]) -> None:
        """Mark messages, all since the last call, as done. What another member has now is left to it."""

    @abstractmethod
    def is_caught_up(self) -> bool:
        """Whether the last read found the end of what this member reads."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


def envelope_text(raw: bytes | str | None, place: str, field: str) -> tuple[str | None, BadInput | None]:
    """A name of an envelope as text, None if it is absent or empty; and why it cannot be read."""
    if not raw:
        return None, None
    if isinstance(raw, str):
        return raw, None
    try:
        return raw.decode(), None
    except UnicodeDecodeError as error:
        return None, BadInput(
            place, None, field, f"is not UTF-8: {error}", "Send the tenant's name in UTF-8."
        )


def letter_notes(letter: Letter) -> dict[str, str]:
    """What a dead letter says beside the original message: where it stood, what is wrong, and the cure."""
    problem = letter.problem
    return {
        "place": letter.delivery.place,
        "field": problem.field or "",
        "reason": problem.reason,
        "cure": problem.cure,
    }
