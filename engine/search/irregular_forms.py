"""Irregular English forms, which no stemmer relates: a question says "went", the memory says "go"."""

from __future__ import annotations

# A base form, and its irregular forms. Omitted: forms that are more common as another word or a name (bit,
# bore, wound, lay, lives, leaves, Rose, Drew), and those that search takes for function words anyway (was,
# did).
_FORMS = """
become: became; begin: began begun; bend: bent; bite: bitten; blow: blew blown; break: broke broken; bring:
brought; build: built; buy: bought; catch: caught; choose: chose chosen; come: came; deal: dealt; dig: dug;
draw: drawn; dream: dreamt; drink: drank drunk; drive: drove driven; eat: ate eaten; fall: fell fallen;
feed: fed; feel: felt; fight: fought; find: found; fly: flew flown; forget: forgot forgotten; forgive:
forgave forgiven; freeze: froze frozen; get: got gotten; give: gave given; go: goes going went gone; grow:
grew grown; hang: hung; hear: heard; hide: hid hidden; hold: held; keep: kept; know: knew known; lead: led;
learn: learnt; leave: left; lend: lent; light: lit; lose: lost; make: made; mean: meant; meet: met; pay:
paid; ride: rode ridden; ring: rang rung; rise: risen; run: ran; say: said; see: sees saw seen; seek:
sought; sell: sold; send: sent; sew: sewn; shake: shook shaken; shine: shone; shoot: shot; show: shown;
shrink: shrank shrunk; sing: sang sung; sink: sank sunk; sit: sat; sleep: slept; slide: slid; speak: spoke
spoken; spend: spent; stand: stood; steal: stole stolen; stick: stuck; strike: struck; swear: swore sworn;
sweep: swept; swim: swam swum; swing: swung; take: took taken; teach: taught; tear: tore torn; tell: told;
think: thought; throw: threw thrown; understand: understood; wake: woke woken; wear: wore worn; weep: wept;
win: won; write: wrote written; child: children; man: men; woman: women; person: people; foot: feet; tooth:
teeth; wife: wives; mouse: mice
"""

BASE_FORMS = {
    form: base
    for base, forms in (entry.split(": ") for entry in " ".join(_FORMS.split()).split("; "))
    for form in forms.split()
}
"""Irregular form -> base form, lower-case."""
