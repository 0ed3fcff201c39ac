#!/bin/bash
# Grades the state left under /workspace: reads plain files there, follows no link, runs nothing of it.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
work=/workspace
verdict=/logs/verifier
reward=1

fail() {
    echo "not as asked: $1"
    reward=0
}

# True when neither the work directory nor any part of the path is a symbolic link.
solid() {
    local path=$work part parts
    [ ! -L "$path" ] || return 1
    IFS=/ read -r -a parts <<< "$1"
    for part in "${parts[@]}"; do
        path=$path/$part
        [ ! -L "$path" ] || return 1
    done
}

# The text of a plain file, at most 64 KiB of it, without its last newlines.
text() {
    head -c 65536 < "$work/$1" | tr '\000' '?'
}

file() {
    if ! solid "$1" || [ ! -f "$work/$1" ] || [ ! -r "$work/$1" ]; then
        fail "$1 is no readable plain file"
    elif [ "$(text "$1")" != "$2" ]; then
        fail "$1 does not hold the expected text"
    fi
}

gone() {
    if [ -e "$work/$1" ] || [ -L "$work/$1" ]; then
        fail "$1 is still there"
    fi
}

folder() {
    if ! solid "$1" || [ ! -d "$work/$1" ]; then
        fail "$1 is no folder"
    fi
}

gone door.md
gone dish.txt
file box.cfg camp

mkdir -p "$verdict"
echo "$reward" > "$verdict/reward.txt"
