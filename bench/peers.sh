#!/usr/bin/env bash
# Make the environments of the peers, outside the repository: bench/peers.sh [lmcache] [mooncake] [codecs]
# Default: all, under ~/.cache/tierkv/peers (TIERKV_PEERS names another place). They borrow torch and
# numpy from .venv through a .pth file; what an absent one would have measured is skipped, visibly.
set -euo pipefail
cd "$(dirname "$0")/.."
root=${TIERKV_PEERS:-$HOME/.cache/tierkv/peers}
here=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

environment() {
  [ -x "$root/$1/bin/python" ] || .venv/bin/python -m venv "$root/$1"
  local site
  site=$("$root/$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$here" >"$site/zz_tierkv.pth"
}

lmcache() {
  environment lmcache
  local pip="$root/lmcache/bin/pip" rest
  "$pip" install -q --no-deps 'lmcache==0.5.6'
  rest=$("$root/lmcache/bin/python" - <<'PY'
from importlib.metadata import requires

absent = ("torch", "cufile-python", "cupy", "pytest", "setuptools", "nixl")
for line in requires("lmcache") or ():
    need, _, condition = line.partition(";")
    if "extra" not in condition and not need.strip().lower().startswith(absent):
        print(need.strip().replace(" ", ""))
PY
  )
  # shellcheck disable=SC2086 # one requirement a word
  "$pip" install -q $rest
}

mooncake() {
  environment mooncake
  "$root/mooncake/bin/pip" install -q 'mooncake-transfer-engine-non-cuda==0.3.13.post1'
}

codecs() { # of bench.codecs; LMCache's too, where its environment is there
  environment codecs
  local site="$root/codecs/lib/python3.*/site-packages" name
  # shellcheck disable=SC2086 # a pattern
  ls -d "$root"/lmcache/lib/python3.*/site-packages >>"$(echo $site)/zz_tierkv.pth" || true
  for name in zipnn lz4 isal zlib-ng blosc2 lifeboat-cache pyturboquant-cpu tierkv-core; do
    "$root/codecs/bin/pip" install -q "$name" || echo "no $name here" >&2
  done
}

for peer in "${@:-lmcache mooncake codecs}"; do
  for one in $peer; do
    case "$one" in
      lmcache | mooncake | codecs) "$one" && echo "$one: $root/$one" ;;
      *) echo "usage: bench/peers.sh [lmcache] [mooncake] [codecs]" >&2; exit 2 ;;
    esac
  done
done
