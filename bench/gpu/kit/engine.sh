#!/usr/bin/env bash
# On the machine with the card, after kernels.sh: the encoder, the engine, and their speed. About five minutes.
#
#   bash bench/gpu/kit/engine.sh FOLDER/two      as bench/gpu/kit.sh has made it
folder=$1
. "$(dirname "$0")/steps.sh"

step unpack 60 bash -c 'for packed in "$2"/*.tar.xz; do tar -xJf "$packed" -C "$1"; done; ls "$1"' - "$site" "$folder"
step encoder 90 $pytest tests/engine/encoders
step engine 120 $pytest tests/engine/step/test_engine_gpu.py tests/engine/base tests/kernels/test_gate_gpu.py
LINES_SHOWN=40 step speed 240 python3 -m undertow.bench.gpu.run --quick --only encoder,ingest,topk --out "$OUT"/engine.json
finish
