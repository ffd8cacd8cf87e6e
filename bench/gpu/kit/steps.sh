# Sourced by the scripts of the kit: time-boxed steps, a log for each under $OUT, and a table at the end.
# STEPS="NAME NAME ..." runs these alone.
export OUT=${OUT:-out} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
site=${KIT_SITE:-/tmp/undertow-kit}
export PYTHONPATH=$PWD/src:$site
pytest="python3 -m pytest -q -p no:cacheprovider --require-gpu -m gpu"
table=$OUT/$(basename "$0" .sh).txt
mkdir -p "$OUT" "$site"
: > "$table"

step() { # NAME SECONDS COMMAND...: goes on whatever comes of it
    local name=$1 limit=$2 began=$SECONDS code=0
    [[ -z ${STEPS:-} || " $STEPS " == *" $name "* ]] || return 0
    shift 2
    echo "==> $name (at most $limit s)"
    timeout -k 5 "$limit" "$@" > "$OUT/$name.log" 2>&1 || code=$?
    tail -n "${LINES_SHOWN:-12}" "$OUT/$name.log"
    printf '%-12s exit %3d  %4d s\n' "$name" "$code" $((SECONDS - began)) >> "$table"
}

finish() {
    echo "==> steps"
    cat "$table"
}
