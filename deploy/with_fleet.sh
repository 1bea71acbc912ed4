#!/usr/bin/env bash
# Start a fleet in the Ray cluster of this host, run a command beside it, and stop the fleet:
#
#   deploy/with_fleet.sh CONFIG COMMAND...
#
# The exit status is the command's. The command finds the fleet at SLIPSTREAM_URL.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: $0 CONFIG COMMAND..." >&2; exit 2; }
config=$1
shift
: "${RAY_API_SERVER_ADDRESS:=http://127.0.0.1:8265}" "${SLIPSTREAM_URL:=http://127.0.0.1:8000}"
export RAY_API_SERVER_ADDRESS SLIPSTREAM_URL

slipstream serve --config "$config" --address "$RAY_API_SERVER_ADDRESS" &
fleet=$! command=
# shellcheck disable=SC2329 # the trap calls it
stop() {
    trap '' TERM INT
    for process in $command $fleet; do
        kill -TERM "$process" 2>/dev/null || true
        wait "$process" || true
    done
}
trap stop EXIT
trap 'exit 143' TERM INT

until slipstream status --json 2>/dev/null | grep -q '"admitted": true'; do
    kill -0 "$fleet" 2>/dev/null || { echo "the fleet did not start" >&2; exit 1; }
    sleep 5
done
"$@" &
command=$!
status=0
wait "$command" || status=$?
command=
exit "$status"
