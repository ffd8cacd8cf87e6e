#!/usr/bin/env bash
# On the machine with the card: the kernels, their speed, and what Nsight Compute says. About four minutes.
#
#   bash bench/gpu/kit/kernels.sh FOLDER/one      as bench/gpu/kit.sh has made it
folder=$1
. "$(dirname "$0")/steps.sh"

step machine 40 bash -c '
    nvidia-smi; nproc; nvcc --version
    python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$1" "$2"/wheels/*.whl
    cp -r "$2"/site/. "$1"/
    mkdir -p shared/data && cp "$2"/locomo_dev.json shared/data/
    python3 -m pip list' - "$site" "$folder"
step kernels 120 $pytest tests/kernels
step compile 60 python3 -m pytest -q -p no:cacheprovider tests/kernels/test_gate_compile.py
LINES_SHOWN=24 step gate 90 python3 -m undertow.bench.gpu.run --quick --only gate --out "$OUT"/gate.json
step sanitize 100 make gpu-sanitize GPU_PYTHON=python3 SANITIZE_SECONDS=45 SANITIZE_TOOLS="memcheck racecheck"
step ncu 60 ncu --clock-control none --target-processes all --set full --kernel-name scan \
    --launch-skip 3 --launch-count 1 --export "$OUT"/scan \
    python3 -m undertow.bench.gpu.run --quick --only gate
finish
