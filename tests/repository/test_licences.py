"""Every package of the environments has a licence that a user of Undertow can live with; -s prints the table.

A package's licence expression counts, else its classifiers, else its line of free text. Every part of it has
to be accepted, those joined by "or" too. No LGPL is there; one that is only imported would be an exception.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# as they are without "license", "software" and the like
ACCEPTED = (
    r"mit(-0|-cmu)?|(0|3-clause-)?bsd(-[23]-clause)?|iscl?|zlib|bsl-1\.0|cc0-1\.0|apache(-2(\.0)?)?|llvm-exception|"
    r"python-foundation|psfl?(-2\.0)?|cnri-python|dfsg-approved|"
    r"mpl-2\.0|mozilla-public-2\.0"  # of files that were changed, and none is changed here
)
EXCEPTIONS = {
    # NVIDIA's own terms: kernels are compiled and run with it, and nothing of it is in our packages
    r"(nvidia|cuda)-.*": r"licenseref-nvidia-.*|nvidia-.*|other/proprietary",
    # it may be taken under MIT instead, as its other line says
    "dirtyjson": "academic-free|afl",
    # builds the manual, and is in no package of ours; its few GPL files are an editor's mode
    "docutils": "public-domain|gnu-general-public-license-gpl|gnu-general-public|gpl",
    # named in their files alone: Apache-2.0 and MIT
    "oss-harmony|setuptools": "none-named",
}


def licence(dist: metadata.Distribution) -> str:
    told = dist.metadata.json
    classified = [line.split(" :: ")[-1] for line in told.get("classifier", ()) if line[:7] == "License"]
    classified = [name for name in classified if name != "OSI Approved"]
    text = str(told.get("license", "")).strip().split("\n")[0]
    return str(told.get("license_expression") or " and ".join(classified) or text or "none named")


@pytest.mark.parametrize("environment", [".venv", ".venv-vllm", ".venv-peers", ".venv-tools"])
def test_every_package_has_an_accepted_licence(environment: str) -> None:
    folders = [str(folder) for folder in ROOT.glob(f"{environment}/lib/python*/site-packages")]
    if not folders and environment != ".venv":
        pytest.skip(f"no {environment}: the Makefile's targets make it")
    refused = {}
    for dist in sorted(metadata.distributions(path=folders or sys.path), key=lambda dist: dist.name.lower()):
        told, package = licence(dist), dist.name.lower()
        print(f"{dist.name:42} {dist.version:16} {told}")
        accepted = [ACCEPTED, *(words for of, words in EXCEPTIONS.items() if re.fullmatch(of, package))]
        for part in re.split(r"\s(?:and|or|with)\s|[()]", told.lower()):
            name = "-".join(re.sub(r"\b(the|software|license|version)\b|,", " ", part).split())
            if name and not any(re.fullmatch(words, name) for words in accepted):
                refused[package] = told
    assert not refused, "look at these licences; accept them here with a reason, or take other packages"
