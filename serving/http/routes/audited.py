"""The audit log off the event loop, around acts that it tells of."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from undertow.serving.auth.audit import AuditLog, AuditOutcome, Entry
from undertow.serving.auth.principal import Principal


@asynccontextmanager
async def audited(
    audit: AuditLog, act: str, sender: Principal | str, tenant_key: str | None = None
) -> AsyncIterator[Entry]:
    """As AuditLog.act; `sender`: who has it done, or the id of the key. AuditError: it was not begun."""
    by = sender if isinstance(sender, str) else sender.key_id
    entry = Entry(act, by, tenant_key=tenant_key)
    await asyncio.to_thread(audit.write, entry, AuditOutcome.BEGUN)
    try:
        yield entry
    except BaseException as error:
        await asyncio.to_thread(audit.write_end, entry, AuditOutcome.FAILED, error=type(error).__name__)
        raise
    await asyncio.to_thread(audit.write_end, entry, AuditOutcome.DONE)
