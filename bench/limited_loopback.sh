#!/bin/sh
# Runs a command in a network namespace of its own whose loopback is limited to RATE, over TCP.
#
#     bench/limited_loopback.sh 1gbit mpiexec -n 2 python ...      RATE as tc writes it, or `unlimited`
#
# The namespace goes with its last process, so nothing is left to take down. Exit 3 where the system gives no right to it.
set -eu

say() { echo "limited_loopback: $1" >&2; }

[ $# -ge 2 ] || { say "usage: $0 RATE COMMAND..."; exit 2; }
for tool in unshare ip tc; do
    command -v "$tool" >/dev/null || { say "$tool is not installed (util-linux, iproute2)"; exit 3; }
done
unshare -n true 2>/dev/null || { say "no right to a network namespace: run as root, or with CAP_SYS_ADMIN and CAP_NET_ADMIN"; exit 3; }

# all three variables are needed: MPICH would otherwise use shared memory, which no limit touches
exec unshare -n sh -c '
    rate=$1; shift
    ip link set lo up || { echo "limited_loopback: the loopback cannot be brought up" >&2; exit 3; }
    if [ "$rate" != unlimited ]; then
        tc qdisc add dev lo root tbf rate "$rate" burst 256kb latency 200ms ||
            { echo "limited_loopback: tc cannot limit the loopback to $rate" >&2; exit 3; }
    fi
    exec env MPIR_CVAR_CH4_NETMOD=ofi FI_PROVIDER=tcp MPIR_CVAR_NOLOCAL=1 GLOO_SOCKET_IFNAME=lo "$@"
' sh "$@"
