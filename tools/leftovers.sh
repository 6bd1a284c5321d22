#!/usr/bin/env bash
# Find processes that still run though the script that started them is done, name them, end them, exit 1.
# Usage: tools/leftovers.sh MARK [GRACE]
#   MARK   a value that the script exported in its environment
#   GRACE  seconds that processes get to end by themselves (default 5): daemons that were just told to stop
# Children inherit the environment, daemons and the jobs of a private Slurm too, so the mark finds what
# has left the process tree, and never a process of anyone else.
set -euo pipefail

mark=${1:?usage: leftovers.sh MARK [GRACE]}
deadline=$((SECONDS + ${2:-5}))

marked_pids() {
    local dir pid
    for dir in /proc/[0-9]*; do
        pid=${dir#/proc/}
        [ "$pid" != "$$" ] && [ "$pid" != "$PPID" ] && [ "$pid" != "$BASHPID" ] || continue
        # A zombie's environment is empty; another user's cannot be read: neither is ours to end.
        if grep -qaF -- "$mark" "$dir/environ" 2>/dev/null; then echo "$pid"; fi
    done
}

while pids=$(marked_pids); [ -n "$pids" ]; do
    [ $SECONDS -lt $deadline ] || break
    sleep 0.5
done
[ -n "$pids" ] || exit 0
echo "left running:" >&2
for pid in $pids; do
    printf '   %s %s\n' "$pid" "$(tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | cut -c 1-160)" >&2
    kill -KILL "$pid" 2>/dev/null || true
done
exit 1
