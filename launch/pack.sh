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
# The files that git tracks and that are there, by their names: a pattern could match others.
while IFS= read -r -d '' file; do
  [[ -L $file || ! -d $file ]] || fail "$file is a submodule, and the archive would lack its files"
  [[ ! -L $file && ! -e $file ]] || printf '%s\0' "$file"
done < <(git ls-files -z --cached) >"$folder/files"
code=0
tar -czf "$1" --no-recursion --null --files-from "$folder/files" --no-null -C "$folder" COMMIT || code=$?
((code <= 1)) || exit "$code" # 1: a file changed while tar read it
{ cat "$folder/files" && printf 'COMMIT\0'; } | tr '\0' '\n' |
  cmp -s - <(tar -tzf "$1" --quoting-style=literal) || fail "$1 has other files than git: $(tar --version | head -n 1)"
