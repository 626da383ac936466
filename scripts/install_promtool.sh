#!/usr/bin/env bash
# Puts promtool, of Debian's prometheus package, into a directory: scripts/install_promtool.sh DIRECTORY
#
# The package is unpacked, not installed: no service is started and no root is needed. Where it cannot be downloaded,
# apt-get installs it. A promtool in PATH is used as it is.
set -euo pipefail

directory=${1:?usage: $0 DIRECTORY}
mkdir -p "$directory"
target=$(cd "$directory" && pwd)/promtool

if found=$(command -v promtool); then
    ln -sf "$found" "$target"
    exit 0
fi

unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT

unpack() (
    cd "$unpacked"
    apt-get download --quiet=2 prometheus && dpkg-deb --extract prometheus_*.deb .
) >"$unpacked/log" 2>&1

install() {
    [[ $(id -u) == 0 ]] && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive \
        apt-get install --quiet=2 --yes --no-install-recommends prometheus >>"$unpacked/log" 2>&1
}

if unpack || { apt-get update --quiet=2 >>"$unpacked/log" 2>&1 && unpack; }; then
    cp "$unpacked/usr/bin/promtool" "$target"
elif install; then
    ln -sf "$(command -v promtool)" "$target"
else
    cat "$unpacked/log" >&2
    echo "tests of alert rules need promtool: install Debian's prometheus package, or put promtool into PATH" >&2
    exit 1
fi
"$target" --version >/dev/null
