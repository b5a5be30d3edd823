#!/usr/bin/env bash
# Prepare a recipe's data: documents -> normalise -> dedup -> tokenizer -> packed shards. Opens no process group.
#   bash scripts/data_preprocess_run.sh [RECIPE] [--set a.b=value ...]
# RECIPE defaults to recipes/quickstart/pretrain.yaml. Prints the shards' directory; what is unchanged is reused.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0; }
bash scripts/setup.sh
recipe=recipes/quickstart/pretrain.yaml
if [[ $# -gt 0 && "$1" != -* ]]; then recipe=$1; shift; fi
exec .venv/bin/python -m finlm prepare "$recipe" "$@"
