"""Records what commands do to keys and tenants, and removes erased tenants from keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from undertow.engine.storage.location import Location
from undertow.serving.cli.output import say

if TYPE_CHECKING:
    from undertow.serving.auth.audit import Entry


@contextmanager
def audited(folder: Path | None, act: str, **known: Any) -> Iterator[Entry]:
    """Record an action on keys or tenants in the folder's audit log. AuditError.

    `folder`: None, for a store that is not a folder, writes nothing.
    """
    from undertow.serving.auth.audit import FILE_NAME, AuditLog, Entry, local_user

    if folder is None:
        yield Entry(act, local_user(), **known)
        return
    with AuditLog(folder / FILE_NAME).act(act, local_user(), **known) as entry:
        yield entry


def forget_names(store: Location, erased: Callable[[str], bool]) -> None:
    """Remove erased tenants from the keys in a store's folder, and say which keys named one."""
    from undertow.serving.auth.key_file import FILE_NAME, KeyFile, KeyFileError

    if not store.folder or not (store.folder / FILE_NAME).exists():
        return
    try:
        for key_id in KeyFile(store.folder / FILE_NAME).forget(erased):
            say(f"Key {key_id} names an erased tenant no more; if it named no other, it is gone.")
    except KeyFileError as error:  # the tenant is erased all the same
        say(f"warning: the keys may still name the tenant: {error}")
