#!/usr/bin/env bash
# Create .venv from the pinned requirements.lock; does nothing when it is already complete. The other scripts call this.
#   bash scripts/setup.sh [requirements-v100.txt]      a profile for older GPUs; it stays chosen until another is named
# PYTHON=/path/to/python3.12 chooses the interpreter; default: the one .venv has, else the first of python3.11, 3.12, 3.13.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0; }
pythons=("$(readlink -f .venv/bin/python 2>/dev/null || true)" python3.11 python3.12 python3.13 python3)
[[ -n "${PYTHON:-}" ]] && pythons=("$PYTHON")
for python in "${pythons[@]}"; do
  if "$python" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
    exec "$python" scripts/setup.py "$@"
  fi
done
cat >&2 <<'MESSAGE'
error: no Python 3.11, 3.12 or 3.13 found (with venv and ensurepip)
  fix:      Debian/Ubuntu: apt-get install python3.11 python3.11-venv; conda: conda create -n finlm python=3.11;
            or name one: PYTHON=/path/to/python3.11 bash scripts/setup.sh
MESSAGE
exit 2
