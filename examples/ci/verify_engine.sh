#!/usr/bin/env bash
# Build an engine, verify it against its source model, and hold it against a committed baseline.
#
#   verify_engine.sh MODEL [RECIPE [BASELINE]]
#
# MODEL      a Hugging Face folder, a .gguf file or a hub name
# RECIPE     a recipe's name or file; int4 unless given
# BASELINE   engine-baseline.json unless given; where there is none, one is written: look at it and commit it
#
# OUT        where results go: the engine, verify.json, verify.xml (JUnit)          [build]
# CACHE      engines that were built before from the same inputs                    [~/.cache/enginewright/engines]
# LEVEL      quick or full                                                          [quick]
# OPTIMIZE_OPTIONS   further words for `optimize`, such as --calibration text.txt
#
# Exit code 0: verified, and no worse than the baseline allows. 1: not. 2: something given cannot be used.
set -euo pipefail
if [ $# -lt 1 ]; then
    echo "which model? verify_engine.sh MODEL [RECIPE [BASELINE]]" >&2
    exit 2
fi
model=$1
recipe=${2:-int4}
baseline=${3:-engine-baseline.json}
out=${OUT:-build}
cache=${CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/enginewright/engines}
level=${LEVEL:-quick}

mkdir -p "$out"
rm -f "$out/verify.json" "$out/verify.xml"  # an earlier run's say nothing of this one
# shellcheck disable=SC2086  # several words are meant
optimize "$model" --recipe "$recipe" --output "$out/engine" --force --cache "$cache" ${OPTIMIZE_OPTIONS:-}

verify=(engine verify "$out/engine" --against "$model" --level "$level" --json "$out/verify.json" --junit "$out/verify.xml")
if [ -e "$baseline" ]; then
    "${verify[@]}" --baseline "$baseline"
else
    "${verify[@]}"
    cp "$out/verify.json" "$baseline"
    echo "there was no baseline: $baseline was written, commit it" >&2
fi
