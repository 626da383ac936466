#!/usr/bin/env bash
# Runs a command while every core is busy with something else: busy.sh COMMAND...
# BUSY is how many loops there are (one per core). They end with the command, and after two hours whatever happens.
set -euo pipefail
cores=$(getconf _NPROCESSORS_ONLN)
loops=()
trap 'kill "${loops[@]}" 2>/dev/null || true' EXIT
for _ in $(seq "${BUSY:-$cores}"); do
  bash -c 'while ((SECONDS < 7200)); do :; done' </dev/null >/dev/null 2>&1 &
  loops+=($!)
done
"$@"
