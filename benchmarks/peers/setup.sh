#!/bin/sh
# Sets the peers up under $PEERS_ROOT (default: batcher-peers in the temporary folder):
# virtual environments, the message classes of our protos, Triton's sleeping backend.
# Needs Python (PYTHON, default python3.11), g++, and h2load (nghttp2-client) for the load.
# Peers can be named; the default is all. What is there already is left as it is.
#
#   benchmarks/peers/setup.sh [grpc] [mosec] [triton]
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=${PEERS_ROOT:-${TMPDIR:-/tmp}/batcher-peers}
python=${PYTHON:-python3.11}
mkdir -p "$root"

# venv NAME PACKAGE...: a finished environment has a marker, so a broken one is made again.
venv() {
    name=$1
    shift
    if [ ! -e "$root/$name/.complete" ]; then
        echo "$name: installing $*"
        rm -rf "${root:?}/$name"
        "$python" -m venv "$root/$name"
        "$root/$name/bin/pip" install --quiet "$@"
        touch "$root/$name/.complete"
    fi
}

setup_grpc() {
    venv grpc grpcio==1.85.* grpcio-tools==1.85.* protobuf uvloop pygrpc-native
    mkdir -p "$root/stubs"
    "$root/grpc/bin/python" -m grpc_tools.protoc -I "$here/../../protos" \
        --python_out="$root/stubs" inference/grpc_service.proto inference/model_config.proto
}

setup_mosec() {
    venv mosec mosec numpy
}

setup_triton() {
    venv triton nvidia-pytriton
    mkdir -p "$root/backends/sleep"
    g++ -O2 -Wall -Wextra -shared -fPIC -o "$root/backends/sleep/libtriton_sleep.so" \
        "$here/triton/sleep_backend.cc"
}

for peer in ${*:-grpc mosec triton}; do
    case $peer in
        grpc | mosec | triton) "setup_$peer" ;;
        *)
            echo "unknown peer: $peer (there are: grpc mosec triton)" >&2
            exit 2
            ;;
    esac
done
command -v h2load >/dev/null || echo "h2load is missing: apt-get install nghttp2-client"
echo "peers are in $root"
