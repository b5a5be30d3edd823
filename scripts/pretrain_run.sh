#!/usr/bin/env bash
# Pretrain a recipe end to end: set-up, data, plan, checks, training, held-out perplexity, export, report.
#   bash scripts/pretrain_run.sh [RECIPE] [--set a.b=value ...] [--hostfile FILE] [--new]
# RECIPE defaults to recipes/quickstart/pretrain.yaml. The same command resumes an unfinished run.
# Hosts come from hostfile.txt when it names any, else this machine is used: all its GPUs, or two CPU ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0; }
bash scripts/setup.sh
recipe=recipes/quickstart/pretrain.yaml
if [[ $# -gt 0 && "$1" != -* ]]; then recipe=$1; shift; fi
exec .venv/bin/python -m finlm train "$recipe" "$@"
