"""`undertow keys`: the API keys of a service, which may run meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from undertow.engine.storage.location import Location
from undertow.serving.auth.audit import audited
from undertow.serving.auth.principal import KeyLimits, Scope, TenantScope
from undertow.serving.cli import options as opt
from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.output import put_json, put_records, put_result, put_text, say
from undertow.serving.cli.stores import is_root

if TYPE_CHECKING:
    from undertow.serving.auth.key_file import KeyFile, NewSecret

KeyId = Annotated[str, typer.Argument(metavar="ID", help="The key's id, as `undertow keys list` shows it.")]
COLUMNS = ("id", "state", "label", "reach", "scopes", "created_at", "expires_at", "former_until")
DAY_S = 86_400

keys = typer.Typer(help="Make and change the API keys of a service.", no_args_is_help=True)


@dataclass(frozen=True)
class KeyPlace:
    """The options that name the key file."""

    store: Annotated[
        Location | None, opt.store_option("The store or cluster's root, with its keys.json.", "FOLDER")
    ] = None
    file: Annotated[
        Path | None, typer.Option("--keys", metavar="FILE", help="A key file elsewhere, instead of --store.")
    ] = None

    def key_file(self) -> KeyFile:
        """The key file, which need not exist. WrongUsage."""
        from undertow.serving.auth.key_file import FILE_NAME, KeyFile

        store, file = self.store, self.file
        if store is not None and file is None:
            if store.folder is None:
                raise WrongUsage(
                    f"{store} is no folder, and keys lie in a file of this machine: give --keys FILE"
                )
            return KeyFile(store.folder / FILE_NAME)
        if file is not None and store is None:
            return KeyFile(file.absolute())
        raise WrongUsage("give --store FOLDER for the keys of a store, or --keys FILE for a file elsewhere")

    def present(self, key_id: str | None = None) -> KeyFile:
        """The key file. KeyFileError: there is neither this file nor the store, or it has no such key."""
        from undertow.engine.storage.store_info import is_store
        from undertow.serving.auth.key_file import KeyFileError

        key_file, store = self.key_file(), self.store
        if not (key_file.path.exists() or (store is not None and (is_store(store) or is_root(store)))):
            option = "--keys" if store is None else "--store"
            raise KeyFileError(
                f"there is no {key_file.path}. Check {option}; `undertow keys create` makes it, with its "
                "first key."
            )
        if key_id is not None:
            key_file.require(key_id)
        return key_file


NO_PLACE = KeyPlace()


@keys.command()
@opt.with_groups
def create(
    scope: Annotated[list[Scope], typer.Option("--scope", help="What it permits; may be repeated.")],
    place: KeyPlace = NO_PLACE,
    tenant: Annotated[
        list[str] | None, typer.Option("--tenant", help="Only for this tenant; may be repeated.")
    ] = None,
    prefixes: Annotated[
        list[str] | None,
        typer.Option("--tenant-prefix", help="For all tenants whose names begin with this, such as acme/."),
    ] = None,
    all_tenants: Annotated[bool, typer.Option("--all-tenants", help="For all tenants.")] = False,
    label: Annotated[str, typer.Option("--label", help="A note for people; not a tenant's name.")] = "",
    expires_days: Annotated[
        int | None,
        typer.Option("--expires-days", min=1, max=36_500, help="Days until it expires; left out: never."),
    ] = None,
    requests_per_s: Annotated[
        float | None, typer.Option("--requests-per-s", help="Average requests a second.")
    ] = None,
    burst: Annotated[
        int | None, typer.Option("--burst", help="Requests at once; left out: those of one second.")
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option("--tokens-per-day", help="LLM tokens a day, in UTC.")
    ] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Make a key and write it to standard output: it is stored hashed, and cannot be shown again."""
    from undertow.serving.auth.key_file import utc_now

    if len(prefixes or ()) > 1:
        raise WrongUsage("a key takes one --tenant-prefix: make a key for each, or name the tenants.")
    key_file = place.key_file()
    prefix = prefixes[0] if prefixes else None
    with wrong_usage():
        reach = TenantScope(tuple(dict.fromkeys(tenant or ())), prefix, all_tenants)
        limits = KeyLimits(requests_per_s, burst, tokens_per_day)
    expires_at = None if expires_days is None else utc_now() + timedelta(days=expires_days)
    scopes = dict.fromkeys(scope)
    with audited(key_file.path.parent, "keys.create") as entry, wrong_usage():
        made = key_file.create(reach, scopes, label=label, limits=limits, expires_at=expires_at)
        entry.key_id = made.key.id
    put_secret(key_file, made, as_json=as_json)
    _warn_of_budget(limits, scopes)


@keys.command(name="list")
@opt.with_groups
def list_(place: KeyPlace = NO_PLACE, as_json: opt.AsJson = False) -> None:
    """List the keys, revoked and expired ones too, without their secrets."""
    from undertow.serving.auth.key_file import describe, utc_now

    found = place.present().read().values()
    records = [describe(key, utc_now()) for key in found]
    if not as_json:
        records = [record | {"reach": str(key.reach)} for record, key in zip(records, found, strict=True)]
    put_records(records, COLUMNS, title=f"{len(records)} keys", as_json=as_json)


@keys.command()
@opt.with_groups
def rotate(
    key_id: KeyId,
    place: KeyPlace = NO_PLACE,
    grace_s: Annotated[
        int,
        typer.Option("--grace-s", min=0, max=365 * DAY_S, help="Seconds that earlier secrets stay valid."),
    ] = DAY_S,
    as_json: opt.AsJson = False,
) -> None:
    """Give a key a new secret and write it to standard output; a running service takes it at once.

    With --grace-s 0 the earlier secrets end now, as after a leak.
    """
    key_file = place.present(key_id)
    with audited(key_file.path.parent, "keys.rotate", key_id=key_id):
        made = key_file.rotate(key_id, timedelta(seconds=grace_s))
    put_secret(key_file, made, as_json=as_json)
    if grace_s and not as_json:
        say(f"Earlier secrets hold for {grace_s:,} more seconds; --grace-s 0 ends them now.")


@keys.command()
@opt.with_groups
def revoke(key_id: KeyId, place: KeyPlace = NO_PLACE, as_json: opt.AsJson = False) -> None:
    """End a key for good; a running service refuses it from its next request on."""
    from undertow.serving.auth.key_file import describe, utc_now

    key_file = place.present(key_id)
    with audited(key_file.path.parent, "keys.revoke", key_id=key_id):
        key = key_file.revoke(key_id)
    put_result(describe(key, utc_now()), f"Key {key.id} is revoked.", as_json=as_json)


def _warn_of_budget(limits: KeyLimits, scopes: Iterable[Scope]) -> None:
    """Warn about a key that may ask for answers with a budget too small for a single one."""
    from undertow.serving.auth.limits import answer_tokens

    if not limits.tokens_per_day or Scope.READ not in scopes:
        return
    if limits.tokens_per_day < (least := answer_tokens(opt.settings_of())):
        say(
            f"warning: {limits.tokens_per_day:,} tokens a day are too few for any answer: each sets "
            f"{least:,} aside first, by UNDERTOW_CONTEXT_TOKENS as it is here. Make another key with more."
        )


def put_secret(key_file: KeyFile, made: NewSecret, *, as_json: bool) -> None:
    """Show a key, this once: alone on standard output, so that it can be piped on."""
    from undertow.serving.auth.key_file import describe, utc_now

    if as_json:
        put_json({"key": made.text, **describe(made.key, utc_now())})
        return
    put_text(made.text)
    say(f"Key {made.key.id} for {made.key.reach}, in {key_file.path}. It cannot be shown again: keep it now.")
