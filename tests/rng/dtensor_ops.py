"""Random functions of a tensor: the same call on a plain tensor and on a DTensor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CHEAP", "FUNCTIONS", "INITIALIZERS"]

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda x: x.clone().uniform_(-1, 2),
    "normal_": lambda x: x.clone().normal_(1, 2),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "geometric_": lambda x: x.clone().geometric_(0.2),
    "random_": lambda x: x.clone().random_(),
    "random_.to": lambda x: x.clone().random_(9),
    "random_.from": lambda x: x.clone().random_(2, 9),
    "bernoulli_.float": lambda x: x.clone().bernoulli_(0.3),
    "bernoulli_.Tensor": lambda x: x.clone().bernoulli_(x.sigmoid()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli.p": lambda x: torch.bernoulli(x, 0.2),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like dtype": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randint_like low": lambda x: torch.randint_like(x, 5, 90, dtype=torch.int64),
    "normal Tensor float": lambda x: torch.normal(x, 2.0),
    "normal float Tensor": lambda x: torch.normal(1.0, x.abs()),
    "normal Tensor Tensor": lambda x: torch.normal(x, x.abs()),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout inplace": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout p=0": lambda x: F.dropout(x, 0.0),
    "dropout p=1": lambda x: F.dropout(x, 1.0),
    "dropout eval": lambda x: F.dropout(x, 0.5, training=False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout mask": lambda x: torch.native_dropout(x.t(), 0.3, True)[1],
    "native_dropout eval": lambda x: torch.native_dropout(x, 0.3, False)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "dropout1d": lambda x: F.dropout1d(x.unsqueeze(-1), 0.3),
    "dropout2d": lambda x: F.dropout2d(x[..., None, None], 0.3),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None, None], 0.3),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x.unsqueeze(-1), 0.3, training=True),
    "attention dropout": lambda x: F.scaled_dot_product_attention(*[x[:, None, None, :]] * 3, dropout_p=0.4),
    "gumbel_softmax": F.gumbel_softmax,
    "multinomial 1": lambda x: torch.multinomial(x.sigmoid(), 1),
    "multinomial 3": lambda x: torch.multinomial(x.sigmoid(), 3),
    "multinomial replacement": lambda x: torch.multinomial(x.sigmoid(), 30, replacement=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu_": lambda x: F.rrelu(x.clone(), training=True, inplace=True),
    "poisson": lambda x: torch.poisson(x.abs()),
    "binomial": lambda x: torch.binomial(x.abs().ceil(), x.sigmoid()),
    "standard_gamma": lambda x: torch._standard_gamma(x.abs() + 0.1),
    "transposed normal_": lambda x: x.t().clone().normal_(),
    "transposed rand_like": lambda x: torch.rand_like(x.t()),
    "transposed bernoulli": lambda x: torch.bernoulli(x.t().sigmoid()),
    # DTensor's own empty_like forgets the memory format of any call but the first.
    "transposed gumbel noise": lambda x: [
        torch.empty_like(x.t()),
        torch.empty_like(x.t(), memory_format=torch.legacy_contiguous_format).exponential_(),
    ][1],
    "bool(any)": lambda x: x + float(bool((x > 1.0).any())),
    "bool(all)": lambda x: x + float(bool((x < 1e9).all())),
    "int(argmax)": lambda x: x + int(x.sum() > 0),
}

INITIALIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "init.uniform_": lambda x: nn.init.uniform_(x.clone()),
    "init.normal_": lambda x: nn.init.normal_(x.clone()),
    "init.xavier_uniform_": lambda x: nn.init.xavier_uniform_(x.clone()),
    "init.xavier_normal_": lambda x: nn.init.xavier_normal_(x.clone()),
    "init.kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x.clone(), a=5**0.5),
    "init.kaiming_normal_": lambda x: nn.init.kaiming_normal_(x.clone()),
    "init.trunc_normal_": lambda x: nn.init.trunc_normal_(x.clone(), std=0.02),
    "init.trunc_normal_ rejects": lambda x: nn.init.trunc_normal_(x.clone(), a=-1.0, b=1.0),
    "init.trunc_normal_ rare": lambda x: nn.init.trunc_normal_(x.clone(), 0, 1, 1.5, 2.5),
    "init.orthogonal_": lambda x: nn.init.orthogonal_(x.clone()),
    "init.orthogonal_ wide": lambda x: nn.init.orthogonal_(x.t().clone(), gain=2.0),
    "init.sparse_": lambda x: nn.init.sparse_(x.clone(), 0.3),
    "init.eye_": lambda x: nn.init.eye_(x.clone()),
    "init.ones_": lambda x: nn.init.ones_(x.clone()),
}

# One of each way through the handlers.
CHEAP = ["normal_", "bernoulli_.Tensor", "randint_like", "dropout", "native_dropout", "multinomial 1", "bool(any)"]
