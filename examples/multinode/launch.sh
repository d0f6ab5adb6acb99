#!/bin/bash
# Several hosts by torchrun, without a scheduler. Run the same line on every host:
#
#   HOSTS=2 FIRST=host-a:29500 examples/multinode/launch.sh examples/pretrain.py --mesh dp=-1,tp=8 --out /shared/run
#
# HOSTS  number of hosts           FIRST  host:port of one of them, the same everywhere
# RANKS  ranks of a host; left out: one for each GPU, or 1
# JOB    a name, where several jobs use one FIRST
# RESTARTS  how often the ranks are started again when one of them has failed, or a host is gone; 0 if it is left out.
#        HOSTS=1:2 goes on with one host of two (see examples/elastic.py)
set -euo pipefail
: "${HOSTS:?number of hosts}" "${FIRST:?host:port of one of the hosts, the same on all}"
gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
ranks=${RANKS:-$((gpus > 0 ? gpus : 1))}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export VESCALE_TIMEOUT=${VESCALE_TIMEOUT:-600} # a job that hangs ends with one sentence: who waits for whom, and where
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or ranks that are started again would find addresses of those before
exec "${PYTHON:-python}" -m torch.distributed.run \
  --nnodes "$HOSTS" --nproc-per-node "$ranks" \
  --rdzv-backend c10d --rdzv-endpoint "$FIRST" --rdzv-id "${JOB:-vescale}" \
  --max-restarts "${RESTARTS:-0}" \
  "$@"
