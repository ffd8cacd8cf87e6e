"""A tenant's own policy: what may be asked for, what stands against a change, and how far one has come."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from undertow.engine.base.model import InputError, Memory, PolicyName, UndertowError
from undertow.engine.base.results import Report
from undertow.engine.storage.row_codec import Control

if TYPE_CHECKING:
    from undertow.engine.tenants.tenant import Tenant

POLICY_NAMES: tuple[str, ...] = get_args(PolicyName)


class PolicyConflict(UndertowError):
    """What was asked does not go with a change of policy that a tenant has had, or is to have."""


def check_name(policy: str) -> None:
    """InputError."""
    if policy not in POLICY_NAMES:
        cure = f"Name one of {', '.join(POLICY_NAMES)}."
        raise InputError.of("policy", "policy", f"{policy!r:.80} is none", cure)


def newest_policy(tenant: Tenant) -> str | None:
    """By its log, whether or not that is decided; None: the store's."""
    return tenant.changes[-1][1] if tenant.changes else tenant.making.policy


def check_edits(tenant: Tenant) -> None:
    """PolicyConflict where users have reworded or deleted memories that a change would replace.

    Memories that are made anew know nothing of it: a wording would be lost, and a memory that was deleted
    while its turns stay may be made again.
    """
    since = tenant.changes[-1][0] if tenant.changes else -1
    edited = {control.body["memory_id"] for control in tenant.controls_from(since + 1) if _is_edit(control)}
    if edited:
        raise PolicyConflict(
            f"{len(edited)} memories of {tenant.name!r} were reworded or deleted by hand, and a change of "
            "policy rebuilds memories from the turns and loses these edits. Set drop_edits (--drop-edits) to "
            "allow that: their history stays. Deleted turns stay out either way."
        )


def _is_edit(control: Control) -> bool:
    """An update without text has lost its words to a deleted turn."""
    return "memory_id" in control.body and (control.kind == "delete" or "text" in control.body)


def check_editable(tenant: Tenant, memory: Memory) -> None:
    """PolicyConflict where an edit of the memory would come to nothing."""
    if (ahead := tenant.change_ahead) is not None:
        raise PolicyConflict(
            f"the memories of {tenant.name!r} are being made anew by the policy {ahead[1]!r}, and edits of "
            "these would be lost. Try again once that is done. Turns can be deleted and updated meanwhile."
        )
    if memory.generation != tenant.shown.number:
        raise PolicyConflict(
            f"memory {memory.id} is of generation {memory.generation}, and {tenant.name!r} has generation "
            f"{tenant.shown.number} now. It is kept as history. Edit one of those that a list shows."
        )


def policy_report(tenant: Tenant, default: str) -> Report:
    """What makes the memories that are searched, and the change that is under way, if any.

    `decided`: how many records of the log the change has come to, of the `records` that it reads again.
    """
    change: Report | None = None
    if (ahead := tenant.change_ahead) is not None:
        seq, name = ahead
        begun = tenant.reread_to == seq
        change = {
            "policy": name,
            "generation": len(tenant.changes) + 1,
            "decided": tenant.cursor if begun else 0,
            "records": seq + 1,
        }
    return {
        "tenant": tenant.name,
        "policy": tenant.shown.policy or default,
        "generation": tenant.shown.number,
        "change": change,
    }
