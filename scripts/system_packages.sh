#!/usr/bin/env bash
# Install the system packages that the tests need (compiler, ssh server, rsync, network tools); as root on Debian or Ubuntu.
#   bash scripts/system_packages.sh
# Elsewhere it only names them: tests whose packages are missing say so.
set -euo pipefail
[[ "${1:-}" == "--help" || "${1:-}" == "-h" ]] && { sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0; }
packages=(g++ git iproute2 libaio-dev openssh-client openssh-server rsync util-linux)
dpkg -s "${packages[@]}" >/dev/null 2>&1 && exit 0
if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then
  echo "installing system packages: ${packages[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
else
  echo "the tests use these system packages: ${packages[*]}" >&2
fi
