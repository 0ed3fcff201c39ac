#!/bin/sh
# Prints the first usable Python 3.11 or newer: one that runs for this user and can make virtual environments.
# The system's own comes first: one below a home directory with mode 700 (pyenv's, for root) cannot be run by the
# unprivileged users that sandboxes and their tests switch to.
for candidate in /usr/bin/python3.11 /usr/local/bin/python3.11 python3.11 python3.12 python3.13 python3; do
    path=$(command -v "$candidate" 2>/dev/null) || continue
    if "$path" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        echo "$path"
        exit 0
    fi
done
echo "No usable Python 3.11 or newer was found. On Debian 12: apt-get install python3.11 python3.11-venv" >&2
exit 1
