#!/bin/sh
# What the tests of the container backend need: an engine, a runtime that every kernel takes, and the maker of the base
# image. Installed by apt where we are root; an ordinary user's tests of containers are skipped, and say so.
set -eu
if [ "$(id -u)" != 0 ]; then
    echo "Not root: podman is not installed, and the tests marked 'container' are skipped"
    exit 0
fi
missing=""
for program in podman runc mmdebstrap; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
# For the fake cluster's network of the pods' own (docs/fake-kubernetes.md); both lie in /usr/sbin.
[ -x "$(command -v ip || echo /usr/sbin/ip)" ] || missing="$missing iproute2"
[ -x "$(command -v iptables || echo /usr/sbin/iptables)" ] || missing="$missing iptables"
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null; then
    echo "The tests of the container backend need$missing: install them with this system's package manager" >&2
    exit 1
fi
echo "Installing$missing"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
