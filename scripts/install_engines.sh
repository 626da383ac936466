#!/usr/bin/env bash
# Installs engines for `make test-engines`, each into a virtual environment of its own:
# scripts/install_engines.sh TRANSFORMERS_DIRECTORY LLAMACPP_DIRECTORY
#
# Packages come from where pip is configured to look (pip.conf, PIP_INDEX_URL). PYTHON picks the interpreter; TORCH_VERSION,
# TRANSFORMERS_VERSION and LLAMACPP_VERSION the releases. An environment whose engine starts is left as it is.
set -euo pipefail

transformers=${1:?usage: $0 TRANSFORMERS_DIRECTORY LLAMACPP_DIRECTORY}
llamacpp=${2:?usage: $0 TRANSFORMERS_DIRECTORY LLAMACPP_DIRECTORY}
python=${PYTHON:-python3}
torch_version=${TORCH_VERSION:-2.13.0}
transformers_version=${TRANSFORMERS_VERSION:-5.22.2}
llamacpp_version=${LLAMACPP_VERSION:-0.3.36}

install() {
    local venv=$1
    shift
    "$venv/bin/python" -m pip --disable-pip-version-check --quiet install "$@" || {
        echo "$* could not be installed into $venv" >&2
        exit 1
    }
}

if ! "$transformers/bin/transformers" serve --help >/dev/null 2>&1; then
    echo "installing transformers $transformers_version into $transformers (a few minutes and 1 GB, once)"
    "$python" -m venv "$transformers"
    # First and by its version: what transformers asks for would bring gigabytes for GPUs.
    install "$transformers" "torch==$torch_version"
    install "$transformers" "transformers[serving]==$transformers_version"
    "$transformers/bin/transformers" serve --help >/dev/null
fi

if ! "$llamacpp/bin/python" -c 'import llama_cpp.server.app, gguf, safetensors' >/dev/null 2>&1; then
    command -v c++ >/dev/null || { echo "llama-cpp-python is compiled, which needs a C++ compiler" >&2; exit 1; }
    echo "compiling llama-cpp-python $llamacpp_version into $llamacpp (10 to 20 minutes, once)"
    "$python" -m venv "$llamacpp"
    # One compiler at a time, and nothing for images: tests may run beside it.
    CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-1} CMAKE_ARGS="${CMAKE_ARGS:--DLLAVA_BUILD=OFF}" \
        install "$llamacpp" "llama-cpp-python[server]==$llamacpp_version" gguf safetensors
    "$llamacpp/bin/python" -c 'import llama_cpp.server.app'
fi
