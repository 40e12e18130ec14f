#!/usr/bin/env bash
# launch/pack.sh ARCHIVE
#
# Packs this checkout as it stands, changes and new files included, what git ignores left out. Its history goes along,
# so that a run knows which commit it is of.
set -euo pipefail
[[ $# -eq 1 && $1 != --help ]] || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

cd "$(dirname "$0")/.."
code=0
git ls-files -z --cached --others --exclude-standard |
  tar -czf "$1" --exclude-from <(git ls-files --deleted) --null --files-from - --no-null .git || code=$?
((code <= 1)) || exit "$code" # 1: a file changed meanwhile
