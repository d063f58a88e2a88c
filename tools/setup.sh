#!/usr/bin/env bash
# Make .venv, with what `make` needs in it: tools/setup.sh demo|dev|docs|models|package|published|ecosystem. It is safe
# to run again. The published models and the ecosystem come in environments of their own, .venv/published and
# .venv/ecosystem, which see the packages of .venv.
#
# A supported torch that the user's Python already has is used as it is, whatever its build. Otherwise the CPU build is
# installed; one for a GPU never is, because that is several gigabytes: install it yourself first to use one.
# `tools/setup.sh torch FOLDER` installs torch, and nothing else, into the environment in FOLDER.
# PYTHON=/path/to/python chooses the interpreter. NO_DOWNLOAD=1 fails rather than fetch torch. TORCH=2.14.1 asks for that
# version of torch instead of the usual one.
#
# torch hands its own folder to the C++ compiler without quotes: in a clone with a space in its path torch is installed
# outside of it, into the user's cache.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:?usage: tools/setup.sh demo|dev|docs|models|package|published|ecosystem, or torch FOLDER}
torch=${TORCH:-2.13.0}
# The version that the kernels' registers and shared memory are held to in the tests; its interpreter wants this numpy.
triton=3.6.0 numpy='<2.4'
# The same range as pyproject.toml.
supported='(2, 11) <= tuple(int(part) for part in version("torch").split("+")[0].split(".")[:2]) < (2, 16)'
[ -z "${TORCH:-}" ] || supported="version('torch').split('+')[0] == '$TORCH'"

runs() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

has_torch() { "$1" -c "from importlib.metadata import version; raise SystemExit(not ($supported))" >/dev/null 2>&1; }

die() { echo "setup: $*" >&2; exit 1; }

has_space() { [[ $1 = *[[:space:]]* ]]; }

# The user's Python if it has a supported torch, else the first one that is new enough.
choose_python() {
    local candidates=(python3 python python3.11 python3.12 python3.13 python3.14) candidate
    for candidate in "${candidates[@]}"; do
        if runs "$candidate" && has_torch "$candidate"; then echo "$candidate"; return; fi
    done
    for candidate in python3.11 python3.12 python3 python3.13 python3.14; do
        if runs "$candidate"; then echo "$candidate"; return; fi
    done
    die "no Python 3.11 or newer found; set PYTHON=/path/to/python"
}

# Lets the environment $2 see the packages of the Python $1, also where that one is in a virtual environment itself.
see_packages_of() {
    "$1" - >"$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/user_packages.pth" <<'PY'
import sys
for path in sys.path:
    if path.endswith(("site-packages", "dist-packages")):
        print(f"import site; site.addsitedir({path!r})")
PY
}

# A Python outside of this folder, made of the Python $1, that has torch.
python_with_torch_elsewhere() {
    local place=${XDG_CACHE_HOME:-${HOME:-/var/tmp}/.cache}/attn_fuse/torch-$torch
    ! has_space "$place" || die "torch.compile fails where torch lies in a path with a space, as here and in $place;" \
        "clone into another folder, or say PYTHON=/path/to/python, of one elsewhere that has torch"
    [ -x "$place/bin/python" ] || "$1" -m venv "$place" >&2 || die "cannot make a virtual environment in $place"
    if ! has_torch "$place/bin/python"; then install_torch "$place" >&2; fi
    echo "$place/bin/python"
}

make_environment() {
    local python=${PYTHON:-}
    [ -n "$python" ] || python=$(choose_python)
    runs "$python" || die "PYTHON=$python is not a working Python 3.11 or newer"
    if ! has_torch "$python" && has_space "$PWD"; then python=$(python_with_torch_elsewhere "$python"); fi
    echo "setup: making .venv with $("$python" --version) ($python)"
    local without_pip=()
    # Then pip and setuptools are those of the user's Python too; venv would put older ones before them.
    if has_torch "$python" && "$python" -m pip --version >/dev/null 2>&1; then without_pip=(--without-pip); fi
    "$python" -m venv --clear ${without_pip[@]+"${without_pip[@]}"} .venv ||
        die "cannot make a virtual environment (Debian: apt-get install python3-venv)"
    if has_torch "$python"; then see_packages_of "$python" .venv; fi
}

# torch into the environment $1.
install_torch() {
    [ -z "${NO_DOWNLOAD:-}" ] || die "no supported torch installed, and NO_DOWNLOAD is set"
    echo "setup: installing the CPU build of torch $torch"
    local wanted=torch==$torch+cpu said
    if [ "$(uname -s)" = Darwin ]; then wanted=torch==$torch; fi
    # Only a CPU build carries +cpu, so none of the two can take a CUDA one.
    if said=$("$1/bin/python" -m pip install --quiet "$wanted" 2>&1); then return; fi
    if "$1/bin/python" -m pip install --quiet --extra-index-url https://download.pytorch.org/whl/cpu "$wanted"; then
        return
    fi
    # Made anew next time, of the PYTHON that is asked for then.
    if [ "$1" = .venv ]; then rm -rf .venv; fi
    printf 'setup: without that index pip said:\n%s\n' "$(grep -i error <<<"$said" || tail -n 3 <<<"$said")" >&2
    die "pip found no CPU build of torch $torch. Install torch yourself, 2.11 to 2.15 and any build, and run" \
        "\`make PYTHON=/path/to/its/python ...\`; or name an index or a folder that has $wanted:" \
        "PIP_EXTRA_INDEX_URL=... or PIP_FIND_LINKS=..."
}

# The project, and what the extra names and is not there yet, in the environment $1. torch and Triton are held to the
# version that is there.
install_project() {
    local constraints=.venv/versions.txt isolation=()
    .venv/bin/python - "$triton" "$numpy" >"$constraints" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version
print("torch==" + version("torch"))
try:
    print("triton==" + version("triton"))
except PackageNotFoundError:
    print("triton==" + sys.argv[1], "numpy" + sys.argv[2], sep="\n")
PY
    # Without a setuptools that is new enough, pip fetches one for the build.
    if .venv/bin/python -c 'import setuptools as s; raise SystemExit(int(s.__version__.split(".")[0]) < 77)' 2>/dev/null; then
        isolation=(--no-build-isolation)
    fi
    "$1/bin/python" -m pip install --quiet ${isolation[@]+"${isolation[@]}"} --constraint "$constraints" --editable ".[$extra]" ||
        die "pip could not install what \`$extra\` in pyproject.toml names. Without a network, install it into a Python" \
            "yourself and run \`make PYTHON=/path/to/that/python ...\`, after \`rm -r .venv\`"
}

check_compiler() {
    if ! command -v "${CXX:-g++}" >/dev/null && ! command -v clang++ >/dev/null && ! command -v c++ >/dev/null; then
        die "torch.compile needs a C++ compiler, and there is none (Debian: apt-get install g++)"
    fi
    .venv/bin/python -c 'import os, sysconfig as s; raise SystemExit(not os.path.exists(s.get_path("include") + "/Python.h"))' ||
        die "torch.compile needs Python.h, and it is not there (Debian: apt-get install python3-dev)"
}

if [ "$extra" = torch ]; then
    install_torch "${2:?usage: tools/setup.sh torch FOLDER}"
    exit
fi
if ! { [ -x .venv/bin/python ] && runs .venv/bin/python; }; then
    make_environment
elif [ -n "${PYTHON:-}" ] && ! has_torch .venv/bin/python; then
    make_environment  # what an earlier try left
fi
if ! has_torch .venv/bin/python; then install_torch .venv; fi
environment=.venv
if [ "$extra" = published ] || [ "$extra" = ecosystem ]; then
    environment=.venv/$extra
    [ -x "$environment/bin/python" ] || .venv/bin/python -m venv --without-pip "$environment"
    see_packages_of "$PWD/.venv/bin/python" "$environment"
fi
install_project "$environment"
check_compiler
.venv/bin/python -c 'import torch, sys; print(f"setup: torch {torch.__version__}, Python {sys.version.split()[0]}: ready")'
touch ".venv/ready-$extra"
