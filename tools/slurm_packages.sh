#!/usr/bin/env bash
# Install what the private Slurm cluster needs, if it is missing and this user may install packages.
# Usage: tools/slurm_packages.sh [--accounting] [--required]
#   --accounting  also slurmdbd and a MariaDB server (only the accounting tests need them)
#   --required    exit 1 if something is still missing afterwards (CI); otherwise one line says what is skipped
# Does not run apt when every program is there. The packages' services are not started: the clusters are private.
set -euo pipefail

base_programs=(slurmctld slurmd sbatch srun scontrol squeue munged ip ps unshare nsenter bwrap)
base_packages=(slurm-wlm slurmctld slurmd munge iproute2 procps util-linux bubblewrap)
accounting_programs=(slurmdbd sacctmgr mariadbd mariadb-install-db)
accounting_packages=(slurmdbd mariadb-server)

accounting=no
required=no
for argument in "$@"; do
    case $argument in
        --accounting) accounting=yes ;;
        --required) required=yes ;;
        *)
            echo "slurm packages: unknown argument '$argument'; known: --accounting --required" >&2
            exit 2
            ;;
    esac
done

programs=("${base_programs[@]}")
packages=("${base_packages[@]}")
if [ "$accounting" = yes ]; then
    programs+=("${accounting_programs[@]}")
    packages+=("${accounting_packages[@]}")
fi

# The daemons lie in sbin, which an ordinary user's PATH may lack.
export PATH="$PATH:/usr/local/sbin:/usr/sbin:/sbin"

missing_programs() {
    local program
    for program in "${programs[@]}"; do
        command -v "$program" >/dev/null || echo "$program"
    done
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

may_install() {
    command -v apt-get >/dev/null && as_root true 2>/dev/null
}

# Debian asks this file before it starts a service. Ours says no only while this script lives.
policy=/usr/sbin/policy-rc.d
forbid_services() {
    [ -e "$policy" ] && return
    printf '#!/bin/sh\n# Temporary: no service is started while stoker installs Slurm for its tests.\nkill -0 %s 2>/dev/null && exit 101\nexit 0\n' $$ |
        as_root tee "$policy" >/dev/null
    as_root chmod 755 "$policy"
    trap 'as_root rm -f "$policy"' EXIT
}

install_packages() {
    echo "slurm packages: installing ${packages[*]}"
    forbid_services
    as_root apt-get -o DPkg::Lock::Timeout=300 -qq update ||
        echo "slurm packages: apt-get update failed; trying the package lists at hand" >&2
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 -qq -y \
        --no-install-recommends install "${packages[@]}" </dev/null >/dev/null
}

missing=$(missing_programs | tr '\n' ' ')
if [ -z "$missing" ]; then
    exit 0
fi
if may_install; then
    install_packages || echo "slurm packages: apt-get failed" >&2
    missing=$(missing_programs | tr '\n' ' ')
fi
if [ -n "$missing" ]; then
    echo "slurm packages: missing $missing- without them the tests marked 'slurm' are skipped and the demo uses cluster=local" \
        "(as root: apt-get install ${packages[*]})" >&2
    [ "$required" = no ] || exit 1
fi
