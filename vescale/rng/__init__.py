"""Random numbers with single-device semantics: every rank draws its part of what one device would draw.

:func:`enable` makes random ops on DTensors do so, in this process, until :func:`disable`. All ranks must start from the
same seed (``torch.manual_seed``); their generators then stay equal. :func:`deferred_init` and :func:`materialize` do the
same for a model's initialization, without ever holding the whole model. Ops, rules and limits are in docs/rng.md.
"""

from vescale.rng._data_order import SampleSeeds, ShardedBatchSampler
from vescale.rng._deferred_tensor import DeferredValueError, is_deferred
from vescale.rng._dtensor_fill import Draw, MicrobatchRows, counting_draws, drawing_rows, draws_rows
from vescale.rng._enable import deferred_init, disable, enable, is_enabled, rand, randint, randn
from vescale.rng._engine import (
    default_generator,
    fill_spans,
    has_drawn,
    host_draws_undone,
    host_random_state,
    set_host_random_state,
    skip_outputs,
)
from vescale.rng._materialize import (
    check_recorded_alike,
    fingerprint,
    has_deferred,
    materialize,
    materialize_part,
    materialize_tensor,
)
from vescale.rng._op_handlers import drawing_part_of, handlers
from vescale.rng._stream_spans import indexed_bits

__all__ = [
    "DeferredValueError",
    "SampleSeeds",
    "ShardedBatchSampler",
    "deferred_init",
    "disable",
    "enable",
    "is_deferred",
    "is_enabled",
    "materialize",
    "materialize_tensor",
    "rand",
    "randint",
    "randn",
]
