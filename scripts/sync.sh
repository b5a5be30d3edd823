#!/usr/bin/env bash
# Copy this repository to the same path on every host of the hostfile and prove that the copies are equal.
#   bash scripts/sync.sh [--hostfile FILE] [--accept-new] [--dry-run]
# FILE defaults to hostfile.txt. Needs passwordless ssh; --accept-new records the keys of hosts seen for the first time.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0; }
bash scripts/setup.sh
exec .venv/bin/python -m finlm sync "$@"
