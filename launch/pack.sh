#!/usr/bin/env bash
# launch/pack.sh ARCHIVE
#
# Packs the files of this checkout that git tracks, with their changes, and the name of the commit, which a run records.
# Other files may be private and are not packed: `git add` a new file that the job needs.
set -euo pipefail
# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[[ $# -eq 1 && $1 != --help ]] || { sed -n '2,/^[^#]/ s/^# \{0,1\}//p' "$0" && exit 0; }

cd "$(dirname "$0")/.."
mapfile -t new < <(git ls-files --others --exclude-standard)
((${#new[@]} == 0)) ||
  printf '[launch] %s files are not packed, because git does not track them: %s\n' "${#new[@]}" "${new[*]:0:10}" >&2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
commit >"$folder/COMMIT"
code=0
git ls-files -z --cached |
  tar -czf "$1" --exclude-from <(git ls-files --deleted) --null --files-from - --no-null -C "$folder" COMMIT || code=$?
((code <= 1)) || exit "$code" # 1: a file changed while tar read it
