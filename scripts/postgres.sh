#!/usr/bin/env bash
# A private PostgreSQL cluster for tests and benchmarks, reached through a Unix socket in its directory.
#
#   scripts/postgres.sh start DIR [-c NAME=VALUE ...]   create the cluster in DIR where needed, start it, print its URL
#   scripts/postgres.sh stop DIR [fast|immediate]       stop it
#
# As root the server runs as the user `postgres`, because it refuses to run as root, and a missing server is installed
# with apt-get.
set -euo pipefail

fail() { echo "postgres.sh: $*" >&2; exit 1; }

find_programs() {
  local found
  for found in "$(pg_config --bindir 2>/dev/null || true)" /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/bin /usr/local/bin; do
    if [ -x "$found/initdb" ] && [ -x "$found/pg_ctl" ]; then programs=$found; return 0; fi
  done
  return 1
}

install_server() {
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null ||
    fail "initdb was not found; install PostgreSQL 13 or later (Debian: apt-get install postgresql)"
  echo "installing PostgreSQL with apt-get" >&2
  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends postgresql; } >&2 ||
    fail "apt-get could not install postgresql"
  find_programs || fail "initdb was not found after postgresql was installed"
}

as_server() {
  if [ "$(id -u)" = 0 ]; then (cd / && runuser -u postgres -- "$@"); else "$@"; fi
}

[ $# -ge 2 ] || fail "usage: postgres.sh start DIR [-c NAME=VALUE ...] | stop DIR [fast|immediate]"
command=$1 directory=$2
shift 2
find_programs || install_server

case $command in
  start)
    mkdir -p "$directory"
    if [ "$(id -u)" = 0 ]; then chown postgres "$directory"; fi
    if [ ! -d "$directory/data" ]; then
      as_server "$programs/initdb" -D "$directory/data" -U inferry -A trust -E UTF8 --locale=C.UTF-8 --no-sync >"$directory.log" 2>&1 ||
        { cat "$directory.log" >&2; fail "initdb failed"; }
    fi
    as_server "$programs/pg_ctl" start -D "$directory/data" -l "$directory/log" -w -t 120 -s \
      -o "-k '$directory' -c listen_addresses='' $*" >&2 || { cat "$directory/log" >&2; fail "the server did not start"; }
    echo "postgresql://inferry@/postgres?host=$directory"
    ;;
  stop)
    as_server "$programs/pg_ctl" stop -D "$directory/data" -m "${1:-fast}" -w -t 120 -s >&2
    ;;
  *) fail "unknown command $command" ;;
esac
