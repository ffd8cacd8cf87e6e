# Sourced by the scripts of the kit: time-boxed steps, one log of them all under $OUT, and a table at its end.
# STEPS="NAME NAME ..." runs these alone; KIT_SECONDS is the time for all steps of a script together.
export OUT=${OUT:-build/gpu} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
site=${KIT_SITE:-/tmp/undertow-kit}
export folder site PYTHONPATH=$PWD/src:$site
pytest="python3 -m pytest -q -p no:cacheprovider --require-gpu"
log=$OUT/$(basename "$0" .sh).log
mkdir -p "$OUT" "$site"
if [ -f "$folder/locomo_dev.json" ] && [ ! -f ../shared/data/locomo_dev.json ]; then
    mkdir -p shared/data && cp "$folder/locomo_dev.json" shared/data/
fi
: > "$log"
table=""

unpack() { # all that the folder holds, into $site
    python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" "$folder"/wheels/*.whl
    [ ! -d "$folder/site" ] || cp -r "$folder"/site/. "$site"/
    local packed
    for packed in "$folder"/*.tar.xz; do
        [ ! -f "$packed" ] || tar -xJf "$packed" -C "$site" || python3 -m tarfile -e "$packed" "$site"
    done
}
export -f unpack

step() { # NAME SECONDS COMMAND...: goes on whatever comes of it
    local name=$1 limit=$2 began=$SECONDS code=0 left=$((${KIT_SECONDS:-$all_seconds} - 5 - SECONDS))
    [[ -z ${STEPS:-} || " $STEPS " == *" $name "* ]] || return 0
    shift 2
    if ((left < 5)); then
        table+=$(printf '%-14s not run: no time is left' "$name")$'\n'
        return 0
    fi
    ((limit <= left)) || limit=$left
    echo "==> $name (at most $limit s)" | tee -a "$log"
    timeout -k 5 "$limit" "$@" > "$OUT/$name.part" 2>&1 || code=$?
    tail -c 2000000 "$OUT/$name.part" >> "$log"
    tail -n "${LINES_SHOWN:-12}" "$OUT/$name.part"
    rm "$OUT/$name.part"
    table+=$(printf '%-14s exit %3d  %4d s' "$name" "$code" $((SECONDS - began)))$'\n'
}

finish() {
    printf '==> steps\n%s' "$table" | tee -a "$log"
}
