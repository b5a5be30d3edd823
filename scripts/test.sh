#!/usr/bin/env bash
# Run the tests: set-up, then pytest without those that need a GPU, in four processes: on two cores there are two that
# wait for their hosts. As root the system packages they need are installed.
#   bash scripts/test.sh [PYTEST ARGUMENTS ...]        for example: bash scripts/test.sh tests/recipe -q
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" ]] && { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0; }
bash scripts/system_packages.sh
bash scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE  # with it every process compiles the tests and finlm again
PATH="$PWD/.venv/bin:$PATH" exec .venv/bin/python -m pytest -m "not gpu" -n 4 --dist loadfile --no-loadscope-reorder "$@"
