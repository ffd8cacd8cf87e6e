"""What tenants may not learn of each other, and whether something that was told holds any of it."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection
from urllib.parse import quote

# a word that one tenant alone says, by the hexadecimal digits of its name
MARK = re.compile(r"q(?:[0-9a-f]{2})+x[0-9]+z")
# of memories, jobs and traces, and the hashes that stand for tenants
ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
RUN = re.compile(r"run\d+-")


def mark(tenant: str, n: int) -> str:
    return f"q{tenant.encode().hex()}x{n}z"


def hash_of(text: str) -> str:
    """32 hexadecimal digits."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class Secrets:
    """Names, words and ids of some tenants whose names begin with `run`. Safe from several threads.

    An id is whose it was told to first: that it is told to another is seen as soon as both were told.
    """

    def __init__(self, run: str, names: list[str]) -> None:
        self._run = run
        # the words that a tenant may be told: those that it has said in this life, or has taken in
        self.words: defaultdict[str, set[str]] = defaultdict(set)
        self._owners: dict[str, str] = {}
        self._names = {form: name for name in names for form in (name, quote(name, safe=""))}
        # the longest first: a name may begin as another does
        self._name = re.compile("|".join(sorted(map(re.escape, self._names), key=len, reverse=True)))

    def own(self, tenant: str, *ids: str) -> None:
        """These are a tenant's ids, and nobody else's."""
        for one in ids:
            owner = self._owners.setdefault(one, tenant)
            assert owner == tenant, f"{tenant!r} was told {one}, an id of {owner!r}'s"

    def learn(self, tenant: str, told: str, *, sent: str = "") -> None:
        """What a tenant was told is all its own, the ids too; but for what it had sent itself."""
        self.check(told, tenant, sent=sent)
        self.own(tenant, *(_ids(told) - _ids(sent)))

    def check(self, told: str, *tenants: str, sent: str = "", ids_of: Collection[str] = ()) -> None:
        """Nothing in this is of anybody but these tenants: no word, no id but those `ids_of`, no name."""
        may_say = {*MARK.findall(sent)}.union(*(self.words[name] for name in tenants))
        strange = {*MARK.findall(told)} - may_say
        assert not strange, f"{tenants} were told the words {sorted(strange)[:3]}: {told[:500]}"
        for one in _ids(told) - _ids(sent):
            owner = self._owners.get(one)
            assert owner in (None, *tenants, *ids_of), f"{tenants} were told {owner!r}'s {one}: {told[:500]}"
        named = self._named(told) - self._named(sent) - {*tenants}
        assert not named, f"{tenants} were told the names {named}: {told[:500]}"
        earlier = {*RUN.findall(told)} - {self._run}
        assert not earlier, f"{tenants} were told of tenants of {earlier}: {told[:500]}"

    def _named(self, told: str) -> set[str]:
        return {self._names[form] for form in self._name.findall(told)}


def _ids(told: str) -> set[str]:
    """A word that is of the right length by chance, as those of a tenant of 16 letters are, is no id."""
    return {*ID.findall(MARK.sub("", told))}
