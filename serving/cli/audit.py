"""Records in the audit log what commands do to keys and tenants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from undertow.serving.auth.audit import Entry


@contextmanager
def audited(folder: Path | None, act: str, **known: Any) -> Iterator[Entry]:
    """Record an action on keys or tenants in the folder's audit log. AuditError.

    `folder`: None for a store that is not a folder; nothing is recorded.
    """
    from undertow.serving.auth.audit import FILE_NAME, AuditLog, Entry, local_user

    if folder is None:
        yield Entry(act, local_user(), **known)
        return
    with AuditLog(folder / FILE_NAME).act(act, local_user(), **known) as entry:
        yield entry
