"""Small models around one torch function or module each, for tests that compare them on a mesh with one device.

``CASES`` maps a name to (a function that makes the model, the shape of its input). Layers named ``a``, ``b`` and ``c``
may be cut; each model returns a scalar.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

__all__ = ["CASES"]

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {}


class Net(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def add(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...] = (6, 6)) -> None:
    CASES[name] = make, shape


def six() -> nn.Linear:
    return nn.Linear(6, 6)


img = (6, 3, 8, 8)
add("mlp", lambda: Net(lambda s, x: s.a(x).relu().square().mean(), a=six()))
for act in [
    "GELU",
    "SiLU",
    "Mish",
    "Hardswish",
    "Softplus",
    "ELU",
    "SELU",
    "CELU",
    "GLU",
    "LogSigmoid",
    "Softshrink",
    "Hardtanh",
    "PReLU",
    "Softsign",
    "Tanhshrink",
    "Threshold2",
    "LeakyReLU",
    "ReLU6",
    "Hardsigmoid",
    "Softmin",
    "Softmax2d_",
]:
    m = {
        "GLU": lambda: nn.GLU(),
        "Threshold2": lambda: nn.Threshold(0.1, 20),
        "Softmin": lambda: nn.Softmin(-1),
        "Softmax2d_": lambda: nn.LogSoftmax(-1),
    }.get(act) or getattr(nn, act)
    add("act-" + act, lambda m=m: Net(lambda s, x: s.m(s.a(x)).square().mean(), a=six(), m=m()))
# losses
add("mse", lambda: Net(lambda s, x: F.mse_loss(s.a(x), x.detach() * 2), a=six()))
add("l1", lambda: Net(lambda s, x: F.l1_loss(s.a(x), x.detach() * 2), a=six()))
add("smoothl1", lambda: Net(lambda s, x: F.smooth_l1_loss(s.a(x), x.detach() * 2), a=six()))
add("huber", lambda: Net(lambda s, x: F.huber_loss(s.a(x), x.detach() * 2), a=six()))
add("bce", lambda: Net(lambda s, x: F.binary_cross_entropy(s.a(x).sigmoid(), (x > 0).to(x.dtype)), a=six()))
add(
    "bcelogits",
    lambda: Net(
        lambda s, x: F.binary_cross_entropy_with_logits(s.a(x), (x > 0).to(x.dtype), pos_weight=torch.tensor(2.0)),
        a=six(),
    ),
)
add("kldiv", lambda: Net(lambda s, x: F.kl_div(s.a(x).log_softmax(-1), x.softmax(-1), reduction="batchmean"), a=six()))
add(
    "nll",
    lambda: Net(lambda s, x: F.nll_loss(s.a(x).log_softmax(-1), x.argmax(-1), weight=torch.arange(1.0, 7.0)), a=six()),
)
add(
    "ce-weight", lambda: Net(lambda s, x: F.cross_entropy(s.a(x), x.argmax(-1), weight=torch.arange(1.0, 7.0)), a=six())
)
add("ce-prob", lambda: Net(lambda s, x: F.cross_entropy(s.a(x), x.softmax(-1), label_smoothing=0.1), a=six()))
add("ce-sum", lambda: Net(lambda s, x: F.cross_entropy(s.a(x), x.argmax(-1), reduction="sum"), a=six()))
add("ce-none", lambda: Net(lambda s, x: F.cross_entropy(s.a(x), x.argmax(-1), reduction="none").mean(), a=six()))
add("ce-2d", lambda: Net(lambda s, x: F.cross_entropy(s.a(x), x.argmax(1)), a=nn.Conv2d(3, 5, 1)), img)
add("multimargin", lambda: Net(lambda s, x: F.multi_margin_loss(s.a(x), x.argmax(-1)), a=six()))
add("mlmargin", lambda: Net(lambda s, x: F.multilabel_margin_loss(s.a(x), x.argsort(-1)), a=six()))
add("mlsoft", lambda: Net(lambda s, x: F.multilabel_soft_margin_loss(s.a(x), (x > 0).to(x.dtype)), a=six()))
add("softmargin", lambda: Net(lambda s, x: F.soft_margin_loss(s.a(x), x.sign()), a=six()))
add("hinge", lambda: Net(lambda s, x: F.hinge_embedding_loss(s.a(x), x.sign()), a=six()))
add("cosemb", lambda: Net(lambda s, x: F.cosine_embedding_loss(s.a(x), x, x[:, 0].sign()), a=six()))
add("triplet", lambda: Net(lambda s, x: F.triplet_margin_loss(s.a(x), s.a(x + 1), x * 2), a=six()))
add("marginrank", lambda: Net(lambda s, x: F.margin_ranking_loss(s.a(x)[:, 0], s.a(x)[:, 1], x[:, 0].sign()), a=six()))
add("poisson", lambda: Net(lambda s, x: F.poisson_nll_loss(s.a(x), x.abs()), a=six()))
add("gaussnll", lambda: Net(lambda s, x: F.gaussian_nll_loss(s.a(x), x, s.a(x).exp()), a=six()))
add(
    "ctc",
    lambda: Net(
        lambda s, x: F.ctc_loss(
            s.a(x).transpose(0, 1).log_softmax(-1),
            x[:, :2].argmax(-1).clamp(min=1),
            torch.full((x.shape[0],), 8),
            torch.full((x.shape[0],), 2),
        ),
        a=six(),
    ),
    (6, 8, 6),
)
add(
    "infonce",
    lambda: Net(
        lambda s, x: F.cross_entropy(
            F.normalize(s.a(x), dim=-1) @ F.normalize(s.b(x), dim=-1).T / 0.1, torch.arange(x.shape[0])
        ),
        a=six(),
        b=six(),
    ),
)
add("pdist", lambda: Net(lambda s, x: F.pdist(s.a(x)).mean(), a=six()))
add("cdist", lambda: Net(lambda s, x: torch.cdist(s.a(x), s.b(x)).mean(), a=six(), b=six()))
add("pairdist", lambda: Net(lambda s, x: F.pairwise_distance(s.a(x), s.b(x)).mean(), a=six(), b=six()))
add("cossim", lambda: Net(lambda s, x: F.cosine_similarity(s.a(x), s.b(x)).mean(), a=six(), b=six()))
add("vicreg", lambda: Net(lambda s, x: (torch.cov(s.a(x).T) - torch.eye(6)).square().sum(), a=six()))
add("corrcoef", lambda: Net(lambda s, x: torch.corrcoef(s.a(x).T).square().sum(), a=six()))
# norms and convs
for n, mk in {
    "bn": lambda: nn.BatchNorm2d(4),
    "gn": lambda: nn.GroupNorm(2, 4),
    "in": lambda: nn.InstanceNorm2d(4, affine=True),
    "lrn": lambda: nn.LocalResponseNorm(2),
    "drop2d": lambda: nn.Dropout2d(0.3),
    "alpha": lambda: nn.AlphaDropout(0.3),
    "fad": lambda: nn.FeatureAlphaDropout(0.3),
    "maxpool": lambda: nn.MaxPool2d(2),
    "avgpool": lambda: nn.AvgPool2d(3, 2, 1),
    "aavg": lambda: nn.AdaptiveAvgPool2d(3),
    "amax": lambda: nn.AdaptiveMaxPool2d(3),
    "lppool": lambda: nn.LPPool2d(2, 2),
    "fmax": lambda: nn.FractionalMaxPool2d(2, output_size=3),
    "up": lambda: nn.Upsample(scale_factor=2),
    "upb": lambda: nn.Upsample(scale_factor=2, mode="bilinear"),
    "upc": lambda: nn.Upsample(scale_factor=1.5, mode="bicubic"),
    "ps": lambda: nn.PixelShuffle(2),
    "pus": lambda: nn.PixelUnshuffle(2),
    "cs": lambda: nn.ChannelShuffle(2),
    "rpad": lambda: nn.ReflectionPad2d(1),
    "reppad": lambda: nn.ReplicationPad2d(1),
    "cpad": lambda: nn.CircularPad2d(1),
    "zpad": lambda: nn.ZeroPad2d(1),
    "unfold": lambda: nn.Unfold(2),
    "convt": lambda: nn.ConvTranspose2d(4, 4, 3, 2),
    "dw": lambda: nn.Conv2d(4, 4, 3, groups=4, dilation=2, padding="same"),
    "lazy": lambda: nn.Conv2d(4, 2, 3, padding_mode="reflect", padding=1),
}.items():
    add(
        "img-" + n,
        lambda mk=mk: Net(lambda s, x: s.m(s.c(x)).square().mean(), c=nn.Conv2d(3, 4, 3, padding=1), m=mk()),
        img,
    )
add(
    "fold",
    lambda: Net(
        lambda s, x: F.fold(F.unfold(s.c(x), 2, stride=2), (8, 8), 2, stride=2).square().mean(), c=nn.Conv2d(3, 4, 1)
    ),
    img,
)
add(
    "gridsample",
    lambda: Net(
        lambda s, x: F.grid_sample(s.c(x), F.affine_grid(s.t(x.mean((2, 3))).view(-1, 2, 3), x.shape)).square().mean(),
        c=nn.Conv2d(3, 4, 1),
        t=nn.Linear(3, 6),
    ),
    img,
)
add("conv1d", lambda: Net(lambda s, x: s.c(x).square().mean(), c=nn.Conv1d(6, 4, 3)), (6, 6, 8))
add("conv3d", lambda: Net(lambda s, x: s.c(x).square().mean(), c=nn.Conv3d(2, 4, 3)), (6, 2, 4, 4, 4))
add(
    "bn1d-3d",
    lambda: Net(lambda s, x: s.b(s.c(x)).square().mean(), c=nn.Conv1d(6, 4, 3), b=nn.BatchNorm1d(4)),
    (6, 6, 8),
)
add("bilinear", lambda: Net(lambda s, x: s.b(s.a(x), x).square().mean(), a=six(), b=nn.Bilinear(6, 6, 3)))
# recurrent
for n, mk in {
    "rnn": lambda: nn.RNN(6, 6, batch_first=True),
    "gru": lambda: nn.GRU(6, 6, 2, batch_first=True, bidirectional=True, dropout=0.2),
    "lstm-proj": lambda: nn.LSTM(6, 6, batch_first=True, proj_size=3),
}.items():
    add(n, lambda mk=mk: Net(lambda s, x: s.m(s.a(x))[0].square().mean(), a=six(), m=mk()), (6, 5, 6))
add("grucell", lambda: Net(lambda s, x: cell(s, x), m=nn.GRUCell(6, 6)), (6, 5, 6))


def cell(s, x):
    h = torch.zeros(x.shape[0], 6, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = s.m(x[:, t], h)
    return h.square().mean()


def lcell(s, x):
    h = c = x.new_zeros(x.shape[0], 6)
    for t in range(x.shape[1]):
        h, c = s.m(x[:, t], (h, c))
    return h.square().mean()


add("lstmcell", lambda: Net(lcell, m=nn.LSTMCell(6, 6)), (6, 5, 6))


def packed(s, x):
    lens = (x[:, 0, 0].abs() * 3).long().clamp(1, 5).cpu()
    p = nn.utils.rnn.pack_padded_sequence(x, lens, batch_first=True, enforce_sorted=False)
    o, _ = s.m(p)
    o, _ = nn.utils.rnn.pad_packed_sequence(o, batch_first=True, total_length=5)
    return o.square().mean()


add("packed", lambda: Net(packed, m=nn.LSTM(6, 6, batch_first=True)), (6, 5, 6))
add(
    "transformer",
    lambda: Net(
        lambda s, x: s.t(x, x).square().mean(), t=nn.Transformer(6, 2, 1, 1, 12, batch_first=True, dropout=0.1)
    ),
    (6, 5, 6),
)
add(
    "decoder-mask",
    lambda: Net(
        lambda s, x: (
            s.t(
                x,
                x,
                tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=x.dtype),
                memory_key_padding_mask=x[:, :, 0] > 1,
            )
            .square()
            .mean()
        ),
        t=nn.TransformerDecoderLayer(6, 2, 12, batch_first=True),
    ),
    (6, 5, 6),
)


# math
def op(name: str, f: Callable[..., torch.Tensor]) -> None:
    """The mean square of ``f`` of a layer's output and its input."""
    add("op-" + name, lambda: Net(lambda s, x: f(s.a(x), x).square().mean(), a=six()))


op("einsum", lambda y, x: torch.einsum("bi,bj->bij", y, x))
op("einsum2", lambda y, x: torch.einsum("bi,cj->bc", y, x))
op("cumsum0", lambda y, x: y.cumsum(0))
op("cumprod", lambda y, x: y.cumprod(1))
op("logcumsumexp", lambda y, x: y.logcumsumexp(0))
op("flip0", lambda y, x: y.flip(0) * x)
op("roll0", lambda y, x: y.roll(1, 0) * x)
op("sort0", lambda y, x: y.sort(0)[0] * x)
op("topk", lambda y, x: y.topk(2, -1)[0])
op("topk0", lambda y, x: y.topk(2, 0)[0])
op("median", lambda y, x: y.median(0)[0])
op("quantile", lambda y, x: y.quantile(0.3, dim=0))
op("kthvalue", lambda y, x: y.kthvalue(2, 0)[0])
op("std0", lambda y, x: y.std(0))
op("var", lambda y, x: y.var())
op("norm", lambda y, x: y.norm() + x.norm(dim=0))
op("logsumexp", lambda y, x: y.logsumexp(0))
op("softmax0", lambda y, x: y.softmax(0) * x)
op("maskidx", lambda y, x: y[x > 0])
op("maskedfill", lambda y, x: y.masked_fill(x > 0, 0))
op("nonzero", lambda y, x: y[(x[:, 0] > 0).nonzero()[:, 0]])
op("where", lambda y, x: torch.where(x > 0, y, x))
op("gather0", lambda y, x: y.gather(0, x.argsort(0)))
op("scatteradd", lambda y, x: torch.zeros(4, 6, dtype=y.dtype).index_add(0, x.argmax(-1) % 4, y))
op(
    "scatterreduce",
    lambda y, x: torch.zeros(4, 6, dtype=y.dtype).scatter_reduce(
        0, (x.argmax(-1) % 4)[:, None].expand(-1, 6), y, "mean"
    ),
)
op("onehotmm", lambda y, x: F.one_hot(x.argmax(-1), 6).to(y.dtype).T @ y)
op("indexput", lambda y, x: torch.zeros_like(y).index_put((torch.arange(2),), y[:2]))
op("repeatint", lambda y, x: y.repeat_interleave(2, 0))
op("tile", lambda y, x: y.tile(2, 1))
op("stackmean", lambda y, x: torch.stack([y, x], 0))
op("chunk0", lambda y, x: torch.cat([c * i for i, c in enumerate(y.chunk(2, 0))]))
op("permreshape", lambda y, x: y.t().reshape(-1, 3))
op("outer", lambda y, x: y @ y.t())
op("matpow", lambda y, x: torch.linalg.matrix_power(y.t() @ y, 2))
op("inv", lambda y, x: torch.linalg.inv(y.t() @ y + torch.eye(6)))
op("solve", lambda y, x: torch.linalg.solve(y.t() @ y + torch.eye(6), x.t()))
op("svd", lambda y, x: torch.linalg.svdvals(y))
op("chol", lambda y, x: torch.linalg.cholesky(y.t() @ y + torch.eye(6)))
op("det", lambda y, x: torch.logdet(y.t() @ y + torch.eye(6)))
op("fft", lambda y, x: torch.fft.rfft(y, dim=-1).abs())
op("fft0", lambda y, x: torch.fft.fft(y, dim=0).real)
op("unfoldt", lambda y, x: y.unfold(1, 3, 1))
op("tril", lambda y, x: y.tril())
op("diag", lambda y, x: (y.t() @ y).diagonal())
op("trace", lambda y, x: (y.t() @ y).trace())
op("cross", lambda y, x: torch.linalg.cross(y[:, :3], x[:, 3:]))
op("lerp", lambda y, x: torch.lerp(y, x, 0.3))
op("addcmul", lambda y, x: torch.addcmul(y, x, x, value=0.5))
op("clampt", lambda y, x: y.clamp(x.min(), x.max()))
op("round", lambda y, x: y - y.round().detach())
op("ste", lambda y, x: y + (y.sign() - y).detach())
op("cummax", lambda y, x: y.cummax(1)[0])
op("diff0", lambda y, x: y.diff(dim=0))
op("bmm", lambda y, x: torch.bmm(y[:, :, None], x[:, None, :]))
op("kron", lambda y, x: torch.kron(y[:2], x[:2]))
op("interp1d", lambda y, x: F.interpolate(y[:, None], scale_factor=2, mode="linear"))
op("glu", lambda y, x: F.glu(y))
op("gumbel", lambda y, x: F.gumbel_softmax(y, hard=True))
op("bernoulli", lambda y, x: y * torch.bernoulli(y.sigmoid().detach()))
op("multinomial", lambda y, x: y.gather(1, torch.multinomial(y.softmax(-1).detach(), 2)))
op("randperm", lambda y, x: y[torch.randperm(y.shape[0])] * x)
op("randn", lambda y, x: y + torch.randn_like(y) + torch.rand(y.shape[0], 1) + torch.randn(6))
op("normal", lambda y, x: torch.normal(y, 1.0))
op("distN", lambda y, x: torch.distributions.Normal(y, y.exp()).rsample())
op(
    "distC",
    lambda y, x: torch.distributions.Categorical(logits=y).log_prob(
        torch.distributions.Categorical(logits=y.detach()).sample()
    ),
)
op("distB", lambda y, x: torch.distributions.Beta(y.exp(), y.exp()).rsample())
op("distG", lambda y, x: torch.distributions.Gamma(y.exp(), 1.0).rsample())
op(
    "kl",
    lambda y, x: torch.distributions.kl_divergence(
        torch.distributions.Normal(y, y.exp()), torch.distributions.Normal(0.0, 1.0)
    ),
)
op("embidx", lambda y, x: y[x.argmax(-1)])
op("tensorsplit", lambda y, x: torch.cat(y.tensor_split(3, 0)[::-1]))
op("setitem", lambda y, x: seti(y, x))


def seti(y, x):
    y = y.clone()
    y[0] = 0
    y[:, 1] = x[:, 2]
    y[x > 1] = 3
    return y


op("inplace", lambda y, x: y.mul(2).add_(x).relu_())
op(
    "complex",
    lambda y, x: torch.view_as_real(torch.view_as_complex(y.reshape(-1, 3, 2)) * torch.polar(x[:, :3].abs(), x[:, 3:])),
)
op("mean0keep", lambda y, x: y - y.mean(0, keepdim=True))
op("argmaxloss", lambda y, x: y.gather(1, y.argmax(1, keepdim=True)))
op("histc", lambda y, x: y * torch.histc(x.detach(), 6))
op("bincount", lambda y, x: y * torch.bincount(x.argmax(-1), minlength=6))
op("unique", lambda y, x: y * torch.unique(x.argmax(-1)).numel())
op("searchsorted", lambda y, x: y * torch.searchsorted(torch.arange(6.0), x))
op("cov", lambda y, x: torch.cov(y.t()))
op("nansum", lambda y, x: y.nansum(0))
op("prod", lambda y, x: y.prod(0))
op("amax", lambda y, x: y.amax(0))
op("aminmax", lambda y, x: torch.stack(torch.aminmax(y)))
op("logdet", lambda y, x: torch.slogdet(y.t() @ y + torch.eye(6))[1])
op("vmapf", lambda y, x: torch.func.vmap(lambda a, b: a * b.sum())(y, x))
op("movedim", lambda y, x: y.reshape(-1, 2, 3).movedim(1, 2))
op("rot90", lambda y, x: y.rot90(1, (0, 1)))
op(
    "meshgrid",
    lambda y, x: (
        y + torch.meshgrid(torch.arange(y.shape[0], dtype=y.dtype), torch.arange(6.0, dtype=y.dtype), indexing="ij")[0]
    ),
)
op("bucketize", lambda y, x: y * torch.bucketize(x, torch.linspace(-1, 1, 5)))
op("renorm", lambda y, x: y.renorm(2, 0, 1.0))
op("nested-ckpt", lambda y, x: torch.utils.checkpoint.checkpoint(lambda a: a.sin().cumsum(0), y, use_reentrant=False))
