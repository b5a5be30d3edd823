#!/usr/bin/env bash
# Supervised fine-tuning of a pretrained checkpoint. Not in this version: it says so and exits with 2.
#   bash scripts/sft_run.sh [RECIPE] [--set a.b=value ...]
set -euo pipefail
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0; }
echo "error: supervised fine-tuning is not in this version yet" >&2
echo "  fix:      bash scripts/pretrain_run.sh trains a base model and exports it in Hugging Face format" >&2
exit 2
