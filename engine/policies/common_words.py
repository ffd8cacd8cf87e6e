"""Words in a text; English ones of small talk, which say nothing, and cues of what matters later."""

from __future__ import annotations

import re

WORDS = re.compile(r"[^\W_]+")
# Chinese, Japanese and Korean, where a run of characters holds many words of about two.
UNSPACED = re.compile(r"[\u2e80-\u9fff\uac00-\ud7a3]+")

_COMMON = (
    "a about absolutely after agree ah all also always am amazing an and another any anybody anyone",
    "anything appreciate are around as at aw away awesome aww back be beautiful because been before being",
    "believe best better big bit both brings brought buddy but by bye can care catch chat come comes cool",
    "could d day dear definitely did didn do does doesn doing don done down dude each else enjoy enjoyed",
    "enjoying even ever every everybody everyone everything exactly excited exciting fact fantastic feel",
    "feeling feels felt few find first for friend friends from fun get gets getting give gives glad go",
    "goes going good got gotta great guess had haha happy hard has have having he hear heard hello help",
    "helped helps her here hey hi him his hmm hope how i if important in incredible inspired inspiring",
    "into is isn it its just keep keeps kind knew know let life like liked likes little ll lol look",
    "looking looks lot lots love loved lovely loves m made make makes making man many may maybe me mean",
    "means might mind miss moment moments more most much must my myself need needs never new nice no nope",
    "not nothing now of off oh ok okay on once one only or other our out over own part people perfect",
    "pleasure pretty probably proud put re real really remember right s said same saw say saying says see",
    "seems seen share sharing she should so some somebody someone something soon sorry sort sound sounds",
    "special still stuff super support sure t take taking talk talking tell than thank thanks that the",
    "their them then there these they thing things think thinking this those though thought through time",
    "times to together too totally tried true try trying up us use used ve very wait wanna want wanted",
    "wants was wasn way we welcome well went were what when where which while who why will wish with won",
    "wonder wonderful word words work working world worth would wow yay yeah yep yes yet you your",
    "yourself",
)
_CUES = (
    "address ago allergic allergy applied april august avoid booked born bought budget buy called cancel",
    "cancelled cannot changed deadline december decide decided engaged favorite favourite february friday",
    "hate hates january join joined july june last lives march married monday month months move moved",
    "moving named next november october plan planned planning prefer prefers quit saturday september",
    "signed start started stopped sunday switched thursday tomorrow tonight tuesday until visit visited",
    "wednesday week weekend weeks works year years yesterday",
)

COMMON_WORDS = frozenset(word for line in _COMMON for word in line.split())
CUES = frozenset(word for line in _CUES for word in line.split())
