#!/usr/bin/env bash
# Fine-tune a recipe's model on dialogues end to end: set-up, data, label lint, plan, checks, training, export, report.
#   bash scripts/sft_run.sh [RECIPE] [--set a.b=value ...] [--hostfile FILE] [--include a@b:0,2] [--new] [--accept-new]
# RECIPE defaults to recipes/quickstart/sft.yaml. The model it starts from is trained first when its recipe was not run.
# Hosts come from hostfile.txt when it names any, else this machine is used. The same command resumes an unfinished run.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0; }
bash scripts/setup.sh
recipe=recipes/quickstart/sft.yaml
if [[ $# -gt 0 && "$1" != -* ]]; then recipe=$1; shift; fi
exec .venv/bin/python -m finlm train "$recipe" "$@"
