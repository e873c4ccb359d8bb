#!/bin/sh
# Makes the certificates that the tests of TLS use, valid for a hundred years: server and client signed by ca; `stranger` is self-signed.
set -eu
cd "$(dirname "$0")"
new() { openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 36500 "$@"; }
new -keyout ca.key -out ca.crt -subj "/CN=gpumgr test CA" -addext "keyUsage=critical,keyCertSign,cRLSign"
for name in server client; do
    new -keyout "$name.key" -out "$name.crt" -subj "/CN=$name" -CA ca.crt -CAkey ca.key \
        -addext "basicConstraints=CA:FALSE" -addext "subjectAltName=DNS:localhost,IP:127.0.0.1"
done
new -keyout stranger.key -out stranger.crt -subj "/CN=stranger" -addext "keyUsage=critical,digitalSignature,keyCertSign"
openssl pkey -in server.key -aes256 -passout pass:secret -out locked.key
rm ca.key
