#!/bin/bash
# Run one job of TLT on the nodes of a Slurm allocation:
#
#   sbatch examples/cluster/slurm.sh configs/qwen3-8b-gsm8k.yaml
#
# The folder in which this is given, TLT's environment (.venv in it), the model and the data have to be
# on a file system that all nodes see. A job that was interrupted goes on with its session's name:
#
#   SESSION=slurm-1234 sbatch examples/cluster/slurm.sh configs/qwen3-8b-gsm8k.yaml
#
#SBATCH --job-name=tlt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=tlt-%j.out
set -euo pipefail
umask 077

spec=${1:?which SPEC? sbatch examples/cluster/slurm.sh SPEC}
session=${SESSION:-slurm-$SLURM_JOB_ID}
state=$PWD/sessions/$session
gpus=${SLURM_GPUS_ON_NODE:-0}
device=$([ "$gpus" = 0 ] && echo cpu || echo cuda)
# the address by which the other nodes reach a node
node_address() { hostname -I | cut -d' ' -f1; }
address=$(node_address)
export -f node_address
ray_port=6379
redis_port=6390
# .venv has another redis-server, without TLS
redis_server=${REDIS_SERVER:-/usr/bin/redis-server}

source .venv/bin/activate
mkdir -p "$state/redis"
secret() { [ -s "$1" ] || openssl rand -hex 32 > "$1"; }
secret "$state/ray-token"
secret "$state/redis-password"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$state/ray-token
export RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 RAY_USAGE_STATS_ENABLED=0

end() {
    trap '' TERM
    tlt down --session "$session" || true
    kill $(jobs -p) 2> /dev/null || true
    wait
}
trap end EXIT
trap 'exit 143' TERM

# Redis, which keeps the session's jobs in files
password=$(< "$state/redis-password")
openssl req -x509 -newkey rsa:3072 -nodes -days 30 -subj /CN=tlt-redis \
    -addext "subjectAltName=IP:$address" \
    -keyout "$state/redis.key" -out "$state/redis.crt" 2> /dev/null
"$redis_server" - > "$state/redis.log" << CONFIGURATION &
bind $address
port 0
tls-port $redis_port
tls-cert-file $state/redis.crt
tls-key-file $state/redis.key
tls-auth-clients no
requirepass $password
dir $state/redis
appendonly yes
CONFIGURATION

# Ray: its head on this node, a raylet on each other one
ray_options=(
    --block --num-cpus "$SLURM_CPUS_PER_TASK" --num-gpus "$gpus"
    --object-store-memory "${OBJECT_STORE_BYTES:-$((32 << 30))}"
    # short, because Ray's sockets are in it
    --temp-dir "/tmp/ray-$SLURM_JOB_ID"
)
start_ray='exec ray start --node-ip-address "$(node_address)" "$@"'
step_options=(--cpus-per-task "$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0)
srun "${step_options[@]}" --nodes=1 --ntasks=1 --nodelist "$SLURMD_NODENAME" \
    bash -c "$start_ray" ray "${ray_options[@]}" \
    --head --port "$ray_port" --include-dashboard false > "$state/ray-head.log" &
until ray health-check --address "$address:$ray_port" > /dev/null 2>&1; do sleep 2; done
others=$((SLURM_NNODES - 1))
if [ "$others" -gt 0 ]; then
    srun "${step_options[@]}" --nodes="$others" --ntasks="$others" --exclude "$SLURMD_NODENAME" \
        bash -c "$start_ray" ray "${ray_options[@]}" \
        --address "$address:$ray_port" > "$state/ray-nodes.log" &
fi
timeout 300 python - "$address:$ray_port" "$SLURM_NNODES" << 'WAIT'
import sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False)
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[2]):
    time.sleep(1)
WAIT

# other users see the arguments of a command
export TLT_REDIS_URL="rediss://:$password@$address:$redis_port/0?ssl_ca_certs=$state/redis.crt"
tlt up --session "$session" --device "$device" --runs "$PWD/runs" --no-dashboard \
    --ray "$address:$ray_port"
# in the background, because bash handles TERM between commands only
tlt submit "$spec" --session "$session" --idempotency-key "$spec" --wait &
wait $!
