#!/usr/bin/env bash
# Builds the documentation site. A warning, such as that of a link without a target, is an error. The same files give the
# same bytes.
#   bash deploy/site/build.sh [OUT]     by default build/site
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out=$(realpath -m "${1:-build/site}")
# MkDocs empties this folder.
[ -z "$(ls -A "$out" 2>/dev/null)" ] || [ -f "$out/search/search_index.json" ] ||
  { echo "build.sh: error: $out has files, but not those of a site; name another folder" >&2; exit 1; }
command -v protoc >/dev/null || { echo "build.sh: error: no protoc; install protobuf-compiler" >&2; exit 1; }
source deploy/tool_environment.sh
tool_environment site

# The sitemap gets the date of the commit.
SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export SOURCE_DATE_EPOCH
export NO_MKDOCS_2_WARNING=1  # the theme's notice that another tool will succeed it
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# --quiet would also turn off the check for warnings.
python -m mkdocs build --config-file deploy/site/mkdocs.yml --site-dir "$out" 2>"$log" ||
  { grep -v '^INFO' "$log" >&2; exit 1; }
echo "${1:-build/site}: $(find "$out" -name '*.html' | wc -l) pages"
