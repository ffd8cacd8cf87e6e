#!/usr/bin/env bash
# On the machine with the card: the kernels, their speed, and what Nsight Compute says. At most four minutes.
#
#   bash bench/gpu/kit/kernels.sh FOLDER/one      as bench/gpu/kit.sh has made it
folder=$1 all_seconds=240
. "$(dirname "$0")/steps.sh"

step machine 30 bash -c 'unpack; nvidia-smi; nproc; nvcc --version; python3 -m pip list'
step kernels 90 $pytest -m gpu tests/kernels
step compile 30 $pytest tests/kernels/test_gate_compile.py
LINES_SHOWN=24 step gate 70 python3 -m undertow.bench.gpu.run --quick --only gate --out "$OUT"/gate.json
step ncu 40 ncu --clock-control none --set full --import-source yes --kernel-name scan \
    --launch-skip 1 --launch-count 1 --force-overwrite --export "$OUT"/scan \
    python3 -m undertow.bench.gpu.launches
finish
