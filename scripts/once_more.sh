#!/usr/bin/env bash
# Runs pytest in parallel; if a few tests fail, these run once more with nothing beside them: once_more.sh PYTEST...
# What fails again fails. What passes only by itself is named: it needs repair, although it does not stop anything.
set -uo pipefail
most=10

"$@" && exit
code=$?
failed=$(grep -o '"tests/.*": true' .pytest_cache/v/cache/lastfailed 2>/dev/null | sed 's/": true$//; s/^"//')
count=$(grep -c . <<<"$failed")
if ((code != 1 || count == 0 || count > most)); then exit "$code"; fi
echo "$count failed: once more, with nothing beside them"
"$@" -n 0 --last-failed --last-failed-no-failures=none || exit
echo "UNSTABLE, passed only by themselves:"
echo "$failed"
