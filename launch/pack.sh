#!/usr/bin/env bash
# launch/pack.sh ARCHIVE
#
# Packs this checkout with its changes and new files, without the files that git ignores. The archive includes .git, so
# that a run can record its commit.
set -euo pipefail
[[ $# -eq 1 && $1 != --help ]] || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

cd "$(dirname "$0")/.."
code=0
git ls-files -z --cached --others --exclude-standard |
  tar -czf "$1" --exclude-from <(git ls-files --deleted) --null --files-from - --no-null .git || code=$?
((code <= 1)) || exit "$code" # 1: a file changed while tar read it
