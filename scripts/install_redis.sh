#!/usr/bin/env bash
# Puts redis-server into a directory, for the tests of several gateways: scripts/install_redis.sh DIRECTORY
#
# Debian's packages are unpacked, not installed: no service is started and no root is needed. Where they cannot be
# downloaded, apt-get installs redis-server. A redis-server in PATH is used as it is.
set -euo pipefail

directory=${1:?usage: $0 DIRECTORY}
mkdir -p "$directory"
target=$(cd "$directory" && pwd)/redis-server

if found=$(command -v redis-server); then
    ln -sf "$found" "$target"
    exit 0
fi

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT

# Debian's redis-server is a link to redis-check-rdb of redis-tools. Libraries that a machine may lack come beside it.
unpack() (
    cd "$unpacked"
    apt-get download --quiet=2 redis-tools libatomic1 libjemalloc2 liblzf1
    for package in *.deb; do dpkg-deb --extract "$package" .; done
    mkdir -p "$target.files"
    cp usr/bin/redis-check-rdb "$target.files/redis-server"
    find usr/lib -name 'lib*.so*' -exec cp --no-dereference {} "$target.files" \;
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q "$@"\n' "$target.files" "$target.files/redis-server" >"$target"
    chmod +x "$target"
    "$target" --version
) >"$unpacked/log" 2>&1

install() {
    [[ $(id -u) == 0 ]] && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install --quiet=2 --yes --no-install-recommends redis-server >>"$unpacked/log" 2>&1
}

if unpack || { apt-get update --quiet=2 >>"$unpacked/log" 2>&1 && unpack; }; then
    exit 0
elif install; then
    ln -sf "$(command -v redis-server)" "$target"
else
    cat "$unpacked/log" >&2
    echo "tests of several gateways need redis-server 7: install Debian's redis-server, or put redis-server into PATH" >&2
    exit 1
fi
"$target" --version >/dev/null
