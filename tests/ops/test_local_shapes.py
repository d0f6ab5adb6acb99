"""Ops that tell what an operand is by its sizes: on sharded operands, one device's results on any number of rows a rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.device import device_type
from tests.ranks import RankPools
from vescale import Plan, parallelize
from vescale.placements import distribute_tensor

L = torch.linalg
D = torch.distributions
A = torch.tensor([[2.0, 0, 0], [0.3, 1.5, 0], [0.1, 0.2, 1.2]])
Op = Callable[[torch.Tensor], torch.Tensor]
# Of rows of three numbers.
OPS: dict[str, Op] = {
    "solve_triangular, vectors": lambda y: L.solve_triangular(A, y.unsqueeze(-1), upper=False),
    "solve_triangular, columns": lambda y: L.solve_triangular(A, y.t(), upper=False),
    "solve_triangular, left=False": lambda y: L.solve_triangular(A, y, upper=False, left=False),
    "solve_triangular, batch": lambda y: L.solve_triangular(
        y[:, :, None] * torch.eye(3) + 2 * A, y.unsqueeze(-1), upper=False
    ),
    "triangular_solve": lambda y: torch.triangular_solve(y.unsqueeze(-1), A, upper=False)[0],
    "solve, vectors": lambda y: L.solve(A, y.unsqueeze(-1)),
    "solve, columns": lambda y: L.solve(A, y.t()),
    "solve, a vector": lambda y: L.solve(A, y[0]),
    "solve, batch": lambda y: L.solve(y[:, :, None] * torch.eye(3) + 5 * A, y),
    "solve, batch of one": lambda y: L.solve(A[None], y.t()[None]),
    "cholesky_solve": lambda y: torch.cholesky_solve(y.unsqueeze(-1), A),
    "lu_solve": lambda y: L.lu_solve(*L.lu_factor(A), y.unsqueeze(-1)),
    "ldl_solve": lambda y: L.ldl_solve(*L.ldl_factor(A @ A.t()), y.unsqueeze(-1)),
    "inv_ex": lambda y: L.inv(y[:, :, None] * torch.eye(3) + 5 * A),
    "multivariate normal": lambda y: D.MultivariateNormal(torch.zeros(3), scale_tril=A).log_prob(y),
    "multivariate normal, means": lambda y: D.MultivariateNormal(y, scale_tril=A).log_prob(y * 2),
    "multivariate normal, scales": lambda y: D.MultivariateNormal(
        y, scale_tril=torch.diag_embed(y.exp()) + 0.1 * torch.ones(3, 3).tril(-1)
    ).log_prob(y * 2),
    "multivariate normal, one value": lambda y: D.MultivariateNormal(y, scale_tril=A).log_prob(torch.ones(3)),
    "low rank normal": lambda y: D.LowRankMultivariateNormal(torch.zeros(3), torch.ones(3, 1), torch.ones(3)).log_prob(
        y
    ),
    "cdist": lambda y: torch.cdist(y, A),
    "cdist, batch": lambda y: torch.cdist(A[None], y.unsqueeze(1)),
    "cross": lambda y: L.cross(y, A[:1]),
    "tensordot": lambda y: torch.tensordot(y, A, dims=1),
    "kron": lambda y: torch.kron(y, A),
    "bilinear": lambda y: nn.functional.bilinear(y, y, A[None]),
    "vander": lambda y: L.vander(y),
    "householder": lambda y: L.householder_product(y[:, :, None], y[:, :1]),
    "outer": lambda y: torch.outer(y[:, 0], A[0]),
    "cov": lambda y: torch.cov(y.t()),
    "matrix_exp": lambda y: torch.matrix_exp(y[:, :, None] * torch.eye(3)),
}


def run_ops(names: list[str]) -> list[str]:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("dp",))
    parallelize(nn.Linear(2, 2), Plan(mesh))
    wrong = []
    for name, rows, place in itertools.product(names, (1, 2, 3, 4), (Shard(0), Shard(1), Replicate())):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))

        class Model(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return OPS[name](x.clone())  # noqa: B023

        model = parallelize(Model(), Plan(mesh).shard("<in:x>", place, mesh="dp"))
        try:
            wanted = OPS[name](x)
        except RuntimeError:
            continue
        try:
            found = model(distribute_tensor(x.clone(), mesh, [Replicate()], src_data_rank=None))
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)
        except Exception as error:
            wrong.append(f"{name} of {rows} rows, {place}: {type(error).__name__} {str(error)[:300]}")
    return wrong


def test_ops_of_sharded_rows(ranks: RankPools) -> None:
    for found in ranks.run(run_ops, list(OPS), world_size=2):
        assert not found, "\n".join(found)
