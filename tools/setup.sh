#!/usr/bin/env bash
# Make what the targets of the Makefile need: tools/setup.sh venv | redis | model
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

exec 9<tools/setup.sh
flock 9 # two makes at once take turns
case "${1:-}" in
  venv | redis | model) "$1" ;;
  *) fail "usage: tools/setup.sh venv | redis | model" ;;
esac
