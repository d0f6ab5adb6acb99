#!/bin/bash
# Several hosts by torchrun, without a scheduler. Run the same line on every host:
#
#   HOSTS=2 FIRST=host-a:29500 examples/multinode/launch.sh examples/pretrain.py --mesh dp=-1,tp=8 --out /shared/run
#
# HOSTS  number of hosts           FIRST  host:port of one of them, the same everywhere
# RANKS  ranks of a host; left out: one for each GPU, or 1
# JOB    a name, where several jobs use one FIRST
set -euo pipefail
: "${HOSTS:?number of hosts}" "${FIRST:?host:port of one of the hosts, the same on all}"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export VESCALE_TIMEOUT=${VESCALE_TIMEOUT:-600} # a job that hangs ends with one sentence: who waits for whom, and where
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$HOSTS" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-endpoint "$FIRST" --rdzv-id "${JOB:-vescale}" \
  "$@"
