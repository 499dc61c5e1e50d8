#!/usr/bin/env bash
# Proves the two commands of the README on a fresh clone of the last commit: make demo, make test. Prints the seconds of each.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
clone="$(mktemp -d)"
trap 'rm -rf "$clone"' EXIT
git clone --quiet "$repository" "$clone/anyshard"
cd "$clone/anyshard"
for target in setup demo test; do
    started=$SECONDS
    make "$target" </dev/null
    echo "make $target: $((SECONDS - started)) s"
done
