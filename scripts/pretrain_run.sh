#!/usr/bin/env bash
# Pretrain a recipe end to end: set-up, data, plan, checks, training, held-out perplexity, export, report.
#   bash scripts/pretrain_run.sh [RECIPE] [--set a.b=value ...] [--hostfile FILE] [--include a@b:0,2] [--new] [--accept-new]
# RECIPE defaults to recipes/quickstart/pretrain.yaml. The same command resumes an unfinished run.
# Hosts come from hostfile.txt when it names any (code and data are copied there over ssh, logs and checkpoint come back),
# else this machine is used: all its GPUs, or two CPU ranks. --print slurm|k8s|torchrun|accelerate|ray only prints.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0; }
bash scripts/setup.sh
recipe=recipes/quickstart/pretrain.yaml
if [[ $# -gt 0 && "$1" != -* ]]; then recipe=$1; shift; fi
exec .venv/bin/python -m finlm train "$recipe" "$@"
