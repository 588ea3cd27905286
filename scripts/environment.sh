# Sourced by scripts/quickstart and scripts/test: makes .venv at the checkout's root, once.
#
# A stamp in .venv holds a digest of everything that decides what is installed, so that the next call starts at once
# and a changed pyproject.toml, constraints.txt or Python installs again.
# PYTHON=/path/to/python chooses the interpreter of a new environment.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
ticker=""

say() { printf '%s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

stop_ticker() {
    [ -z "$ticker" ] && return
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=""
    printf '\r\033[K'
}

# ------------------------------------------------------------ which Python

is_supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' >/dev/null 2>&1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.13 python3.11 python3.14 python; do
        if is_supported "$candidate"; then
            printf '%s' "$candidate"
            return
        fi
        if [ "$candidate" = "${PYTHON:-}" ]; then
            fail "PYTHON=$PYTHON is not a Python of version 3.11 or later; point it to one, or unset it."
        fi
    done
    fail "no Python of version 3.11 or later was found (python3 is $(python3 -V 2>&1 | head -n 1)); install one, or point PYTHON to it."
}

# ------------------------------------------------------------ is there room

# CUDA builds of torch bring their libraries with them.
required_gb() { if command -v nvidia-smi >/dev/null 2>&1; then echo 12; else echo 4; fi; }

check_disk() {
    local free needed
    free=$(($(df -Pk "$root" | awk 'NR == 2 { print $4 }') / 1048576))
    needed=$(required_gb)
    [ "$free" -ge "$needed" ] || fail "the disk that holds $root has $free GB free, the installation needs $needed GB; free some space, or move the checkout."
}

# ------------------------------------------------------------ installing

digest() {
    "$venv/bin/python" -I - "$root" <<'PYTHON'
import hashlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
parts = [sys.version, str(root), *((root / name).read_text() for name in ("pyproject.toml", "constraints.txt"))]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PYTHON
}

is_stamped() { [ "$(cat "$venv/.installed-$2" 2>/dev/null)" = "$1" ]; }

# Is the environment there, with the extras that were asked for ("dev" includes what "" installs)?
is_ready() {
    [ -x "$venv/bin/python" ] || return 1
    local wanted
    wanted=$(digest 2>/dev/null) || return 1
    is_stamped "$wanted" dev || { [ -z "$1" ] && is_stamped "$wanted" base; }
}

make_venv() {
    if [ -x "$venv/bin/python" ] && is_supported "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then return; fi
    local python
    python=$(find_python)
    if [ -e "$venv" ]; then
        [ -f "$venv/pyvenv.cfg" ] || fail "$venv exists and is not a Python environment; move it away."
        rm -rf "$venv"
    fi
    say "· making .venv with $("$python" -V)"
    "$python" -m venv "$venv" >"$root/.venv.log" 2>&1 || {
        cat "$root/.venv.log" >&2
        rm -rf "$venv" "$root/.venv.log"
        fail "$python cannot make an environment (on Debian and Ubuntu: install the package python3-venv)."
    }
    rm -f "$root/.venv.log"
}

# install WHAT PIP-ARGUMENTS…: one line with the seconds that passed; pip's own words go to a log.
install() {
    local what="$1" log="$venv/install.log" began=$SECONDS
    shift
    if [ -t 1 ]; then
        (while :; do printf '\r· installing %s … %d s' "$what" $((SECONDS - began)) && sleep 1; done) &
        ticker=$!
    else
        say "· installing $what"
    fi
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check --no-compile -c "$root/constraints.txt" "$@" >"$log" 2>&1; then
        stop_ticker
        explain "$what" "$log"
    fi
    stop_ticker
    [ -t 1 ] && say "· installed $what in $((SECONDS - began)) s"
    return 0
}

explain() {
    if grep -qiE 'no space left|errno 28' "$2"; then
        fail "the disk is full: installing $1 needs about $(required_gb) GB in $root and in pip's temporary folder (${TMPDIR:-/tmp})."
    elif grep -qiE 'connection|resolv|timed out|network|proxy|ssl|no matching distribution|could not find a version|resolutionimpossible' "$2"; then
        fail "pip cannot get $1 in the pinned version: is there a network, and a package registry that pip can reach? The whole story is in $2"
    fi
    tail -n 3 "$2" >&2
    fail "pip could not install $1; the whole story is in $2"
}

# ensure_environment [dev]
ensure_environment() {
    local extra="${1:-}"
    is_ready "$extra" && return
    trap stop_ticker EXIT
    trap 'stop_ticker; say "interrupted; the same command goes on from here."; exit 130' INT
    check_disk
    make_venv
    # torch first and from the pin: whatever depends on it must find it there, or it would bring a build of its own.
    install "torch (the largest part)" torch
    install "outrider${extra:+ with the $extra extra}" -e "$root${extra:+[$extra]}"
    # pip compiles with one core, which takes longer than all else that it does. (Some packages hold what does not compile.)
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
    digest >"$venv/.installed-${extra:-base}"
}
