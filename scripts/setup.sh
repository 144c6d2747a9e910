#!/usr/bin/env bash
# Make .venv: everything that `make demo` and `make test` need on one CPU machine, pinned by
# requirements/cpu.lock, and nemo_specrl itself as an editable install. Quick when nothing has
# changed; a run that was interrupted starts over.
#
#   PYTHON=python3.12 scripts/setup.sh     # another Python than python3.11
#   scripts/setup.sh vllm VERSION          # .venv-vllm-VERSION: the same with another vLLM
#   scripts/setup.sh nemo DIR [VERSION]    # .venv-nemo-VERSION: what the checkout of NeMo-RL in DIR
#                                          # needs, with the vLLM that it pins or another one
#
# The last line of output of `vllm` and `nemo` is the environment's folder.
set -euo pipefail

say() { echo "setup: $*" >&2; }
die() {
    say "$*"
    exit 1
}

# The version of vLLM that a checkout of NeMo-RL pins: 0.25.1.
pinned_vllm() {
    local project=$1/pyproject.toml
    [[ -n $1 && -f $project && -d $1/nemo_rl ]] ||
        die "'$1' is no checkout of NeMo-RL; give its folder: make test-nemo NEMO_RL_HOME=DIR"
    grep -om1 'vllm==[0-9.]*[0-9]' "$project" | cut -d= -f3 ||
        die "$project pins no version of vLLM (looked for vllm==VERSION)"
}

kind=${1:-default}
case $kind in
    default) ;;
    vllm) version=${2:-} ;;
    nemo) pinned=$(pinned_vllm "${2:-}") version=${3:-$pinned} ;;
    *) die "there is no environment '$kind'; give none, vllm VERSION, or nemo DIR [VERSION]" ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ $kind == default ]]; then
    lock=requirements/cpu.lock venv=.venv
else
    lock=requirements/$kind-$version.lock venv=.venv-$kind-$version
    if [[ ! -f $lock ]]; then
        known=$(printf '%s\n' requirements/"$kind"-*.lock | sed "s/.*$kind-//; s/\.lock$//" | paste -sd' ')
        die "no lock for vLLM '$version'; there are: $known (requirements/lock makes them)"
    fi
fi
# A lock with another torch than the default one has its CUDA build and the libraries that it needs.
if [[ $(grep '^torch==' "$lock") == $(grep '^torch==' requirements/cpu.lock) ]]; then
    cpu_torch=yes size="1 GB to download, 2.5 GB on disk"
else
    cpu_torch=no size="3 GB to download, 5.5 GB on disk"
fi
# NeMo-RL rewrites files of vLLM on disk, which must not be those of uv's cache.
[[ $kind != nemo ]] || export UV_LINK_MODE=copy
log=$venv/setup.log

# A Python that runs, with venv and pip: Debian ships these apart, pyenv has names that do not run.
usable() { "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }

find_python() {
    local name
    if [[ -n ${PYTHON:-} ]]; then
        usable "$PYTHON" || die "PYTHON=$PYTHON is no Python 3.11 to 3.13 with the venv module"
        python=$PYTHON
        return
    fi
    for name in python3.11 python3.12 python3.13; do
        usable "$name" || continue
        python=$name
        [[ $name == python3.11 ]] || say "no python3.11 here, taking $name (the lock was made for 3.11)"
        return
    done
    die "no Python 3.11, 3.12 or 3.13 with the venv module (on Debian: apt-get install python3.11-venv)"
}

# The one compiled part: an editable install leaves its library beside it, for any Python.
native=nemo_specrl/drafting/_suffix.c
built=${native%.c}.abi3.so

# The contents of the two stamps. The folder is in one because the scripts in .venv/bin name it.
stack_state() { { echo "$PWD" && cat "$lock" scripts/setup.sh; } | sha256sum; }
project_state() { cat pyproject.toml "$native" | sha256sum; }
same() { [[ -f $1 && $(<"$1") == "$2" ]]; }

# The Python of .venv still runs, and is the one asked for.
same_python() {
    local version
    version=$("$venv/bin/python" -V 2>/dev/null) && [[ -z ${PYTHON:-} || $version == $("$PYTHON" -V 2>/dev/null) ]]
}

# In parentheses with exec, so that to kill the job is to kill the installer.
pip() (exec "$venv/bin/python" -m pip install --quiet --no-compile "$@" >>"$log" 2>&1)
uv() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@" >>"$log" 2>&1; }
pinned() { grep "^$1==" "$lock"; }
failed() { die "could not install $1: $(grep -i error "$log" | tail -n 1) (all of it: $log)"; }

# uv reads no settings of pip; where that is what it takes, pip does the same, slower.
install_rest() {
    local rest=$venv/rest.txt
    if [[ $cpu_torch == yes ]]; then grep -v '^torch==' "$lock" >"$rest"; else cp "$lock" "$rest"; fi
    pip "$(pinned uv)" && uv --no-deps -r "$rest" && return
    say "uv could not install, trying pip (takes minutes)"
    pip --no-deps -r "$rest"
}

# The CPU build of torch needs nothing more; a CUDA build brings its own libraries.
complete_torch() {
    local version
    version=$("$venv/bin/python" -c 'import runpy, sysconfig
v = runpy.run_path(sysconfig.get_path("purelib") + "/torch/version.py")
print(v["__version__"] if v["cuda"] else "")')
    [[ -z $version ]] && return
    say "note: pip took torch $version, a CUDA build; it works on a CPU, but brings 4 GB of libraries."
    say "note: to avoid that, remove $venv, set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, run again."
    pip "$(pinned torch)"
}

install_stack() {
    find_python
    say "installing $(grep -c == "$lock") packages into $venv with $python: $size"
    rm -rf "$venv/.stack" "$venv/.project" "$venv"   # the stamps first, in case this is interrupted
    "$python" -m venv "$venv" || die "$python -m venv failed"
    if [[ $cpu_torch == no ]]; then
        install_rest || failed "the lock"
        return
    fi
    # torch goes through pip, which finds the machine's CPU build where pip's settings name one.
    pip --no-deps "$(pinned torch)" &
    local torch=$!
    # shellcheck disable=SC2064 # the number as it is now
    trap "kill $torch 2>/dev/null || true" EXIT
    install_rest || failed "the lock"
    wait "$torch" || failed torch
    trap - EXIT
    complete_torch || failed "what torch needs"
}

[[ $(uname -s) == Linux ]] || die "the CPU stack runs on Linux only, this is $(uname -s)"
exec {turn}<scripts/setup.sh
flock --nonblock "$turn" || { say "another set-up is running, waiting for it" && flock "$turn"; }

stack=$(stack_state)
project=$(project_state)
if ! same "$venv/.stack" "$stack" || ! same_python; then
    install_stack
    echo "$stack" >"$venv/.stack"
fi
if ! same "$venv/.project" "$project" || [[ ! -f $built || $native -nt $built ]]; then
    command -v cc >/dev/null || die "no C compiler (on Debian: apt-get install gcc python3-dev)"
    uv --no-deps --no-build-isolation --editable . || pip --no-deps --no-build-isolation --editable . ||
        failed nemo_specrl
    echo "$project" >"$venv/.project"
    say "ready: $venv/bin/nemo-specrl --help"
fi
[[ $kind == default ]] || echo "$venv"
