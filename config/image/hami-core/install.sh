#!/bin/sh
# Puts the libvgpu.so beside this script in place on a node; the init container and `gpumgr install library` run it:
#
#   FOLDER/SHA256/libvgpu.so, FOLDER/SHA256/version     the library; containers mount it, so it is replaced only if it is damaged
#   FOLDER/libvgpu.so -> SHA256/libvgpu.so              the library of new containers; the agent takes path and SHA-256 from this link
#
# Every file appears complete or not at all, and a failure leaves the link as it was. Runs on one folder wait for each other. Copies of
# other libraries stay: a container that restarts mounts the copy with which it was created.
#
# usage: install.sh FOLDER
set -eu

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

# Whether a regular file has the library's SHA-256.
matches() {
    [ -f "$1" ] && [ ! -L "$1" ] && echo "$sha256  $1" | sha256sum --check --status 2> /dev/null
}

[ $# -eq 1 ] || fail "usage: install.sh FOLDER"
folder=$1
here=$(dirname "$0")
sha256=$(cut -c 1-64 "$here/libvgpu.so.sha256")
version=$(cat "$here/version")
matches "$here/libvgpu.so" || fail "libvgpu.so does not have the SHA-256 beside it, $sha256: pull or build the image again"

umask 022
mkdir -p "$folder" || fail "$folder can't be made: mount the node's folder there, writable"
exec 9< "$folder"
flock 9
link=$folder/libvgpu.so
[ -L "$link" ] || [ ! -e "$link" ] || fail "$link is not a link of gpumgr: move it away"

target=$folder/$sha256
mkdir -p "$target" || fail "$folder can't be written: mount the node's folder there, writable"
if ! matches "$target/libvgpu.so" || [ "$(stat -c %a "$target/libvgpu.so")" != 755 ]; then
    new=$target/.libvgpu.so.new
    rm -rf "$new" # of an interrupted run
    cp "$here/libvgpu.so" "$new" && chmod 755 "$new" && sync "$new" || fail "$new can't be written: make room in the node's folder"
    matches "$new" || fail "$new does not have the SHA-256 $sha256 after the copy: the node's disk is broken, or the file was changed"
    mv -fT "$new" "$target/libvgpu.so"
fi
if [ "$(cat "$target/version" 2> /dev/null)" != "$version" ]; then
    rm -rf "$target/.version.new"
    printf '%s\n' "$version" > "$target/.version.new"
    sync "$target/.version.new"
    mv -fT "$target/.version.new" "$target/version"
fi
sync "$target"
if [ "$(readlink "$link")" != "$sha256/libvgpu.so" ]; then
    rm -rf "$folder/.libvgpu.so.new"
    ln -s "$sha256/libvgpu.so" "$folder/.libvgpu.so.new"
    mv -fT "$folder/.libvgpu.so.new" "$link"
    state=installed
else
    state=unchanged
fi
printf '%s libvgpu.so %s, SHA-256 %s\n' "$state" "$version" "$sha256"
sync "$folder"
