#!/usr/bin/env bash
# Installs Chromium for the tests of the dashboard, where it is missing: scripts/install_chromium.sh
#
# Debian and Ubuntu only, and as root; elsewhere install it by hand. CHROMIUM names another program.
set -euo pipefail

chromium=${CHROMIUM:-/usr/bin/chromium}
if [[ -x $chromium ]]; then exit 0; fi

fail() {
    echo "The tests of the dashboard need Chromium at $chromium: $1" >&2
    exit 1
}

if [[ -n ${CHROMIUM:-} ]]; then fail "there is no such program"; fi
if ! command -v apt-get >/dev/null; then fail "install it with your system's package manager, or set CHROMIUM"; fi
if [[ $(id -u) -ne 0 ]]; then fail "run 'sudo apt-get install chromium', or set CHROMIUM"; fi

echo "installing Chromium with apt-get (300 MB, once)"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq || fail "apt-get update failed"
apt-get install -y -qq --no-install-recommends chromium >/dev/null || fail "apt-get install chromium failed"
[[ -x $chromium ]] || fail "apt-get did not install it there"
