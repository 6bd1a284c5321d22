#!/usr/bin/env bash
# Make .venv with the package (editable) and everything that development and tests need.
# The Makefile calls it when pyproject.toml or the constraints changed. Needs the network on its first run.
#   PYTHON  interpreter the environment is made from (default: python3)
#   TORCH   requirement that replaces the pinned torch, e.g. TORCH='torch==2.11.0' or 'torch @ file:///path/to.whl'
#   EXTRAS  extras of the package to install (default: dev)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
torch=${TORCH:-}
extras=${EXTRAS:-dev}
venv=.venv

fail() {
    echo "venv: $*" >&2
    exit 1
}

check_python() {
    command -v "$python" >/dev/null || fail "no '$python' found; install Python 3.10 or newer, or set PYTHON=/path/to/python3"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old; stoker needs 3.10 or newer: set PYTHON=/path/to/python3"
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# Debian ships the venv module without ensurepip; python3-venv completes it.
complete_python() {
    "$python" -c 'import ensurepip, venv' 2>/dev/null && return
    local package
    package=python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv
    echo "venv: '$python' lacks ensurepip; installing $package"
    if ! command -v apt-get >/dev/null || ! as_root true 2>/dev/null; then
        fail "cannot install it without apt-get and root (or password-less sudo); ask for $package"
    fi
    as_root apt-get -o DPkg::Lock::Timeout=120 update -qq || echo "venv: apt-get update failed; trying the lists at hand" >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 install -y -qq --no-install-recommends "$package" >/dev/null
}

make_venv() {
    echo "venv: making $venv with torch and the development tools; minutes, and 5 GB with torch's CUDA build"
    # A copied or moved environment points at its old place; a half-made one has no pip.
    if [ -e "$venv" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        echo "venv: $venv does not work; making it anew"
        rm -rf "$venv"
    fi
    [ -e "$venv" ] || "$python" -m venv "$venv"
}

write_constraints() {
    if [ -n "$torch" ]; then
        grep -v '^torch[=<>~! ]' requirements/constraints.txt
        printf '%s\n' "$torch"
    else
        cat requirements/constraints.txt
    fi >"$venv/constraints.txt"
}

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}

check_python
[ -x "$venv/bin/python" ] || complete_python
make_venv
write_constraints
# setuptools first and no build isolation: the build then needs no second download and sees the pinned version.
pip_install --constraint "$venv/constraints.txt" 'setuptools>=77' wheel
pip_install --constraint "$venv/constraints.txt" --no-build-isolation --editable ".[$extras]"
echo "venv: $venv is ready: $("$venv/bin/python" --version), torch $("$venv/bin/python" -c 'from importlib.metadata import version; print(version("torch"))')"
