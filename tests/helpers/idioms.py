"""Ways of writing a model, one small example each: those that `trace` understands, and those that
it refuses.
"""

import torch
from torch import nn
from torch.nn import functional as F


class Settings:
    """What several modules look up."""

    def __init__(self):
        self.heads, self.width = 4, 8


class Configured(nn.Module):
    """Attention that asks its configuration for every size."""

    def __init__(self, settings):
        super().__init__()
        self.settings = settings
        self.qkv, self.out = (
            nn.Linear(settings.width, 3 * settings.width),
            nn.Linear(settings.width, settings.width),
        )

    def forward(self, x):
        B, T, C = x.shape
        heads = self.settings.heads
        parts = self.qkv(x).split(self.settings.width, -1)
        q, k, v = (
            part.view(B, T, heads, self.settings.width // heads).transpose(1, 2) for part in parts
        )
        return x + self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C)
        )


class Written(nn.Module):
    """A model written as one function of its layers."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.write = forward
        for key, part in parts.items():
            setattr(self, key, part)

    def forward(self, *args):
        return self.write(self, *args)


def two(width=6, out=2, **more):
    return {"a": nn.Linear(5, width), "b": nn.Linear(width, out), **more}


X, SEQUENCE, PICTURE = (3, 5), (3, 4, 5), (3, 3, 8, 8)
REFUSED = {
    "softmax over units": (
        lambda: Written(lambda m, x: m.b(m.a(x).softmax(-1)), **two()),
        X,
        r"'softmax' in the model \(Written\).*mixes",
    ),
    "softmax over units that are counted": (
        lambda: Written(lambda m, x: m.b(m.a(x).view(len(x), m.count).softmax(-1)), **two(count=6)),
        X,
        r"'softmax' in the model \(Written\).*mixes",
    ),
    "largest unit": (
        lambda: Written(
            lambda m, x: m.a(x).amax(-1, True) * m.b(x), a=nn.Linear(5, 6), b=nn.Linear(5, 2)
        ),
        X,
        "'amax'.*reduces",
    ),
    "sigmoid summed over units": (
        lambda: Written(
            lambda m, x: m.a(x).sigmoid().sum(-1, True) * m.b(x),
            a=nn.Linear(5, 6),
            b=nn.Linear(5, 2),
        ),
        X,
        "cutting 'a'.*'sum' in the model",
    ),
    "noise on units": (
        lambda: Written(lambda m, x: m.b(m.a(x) + torch.randn_like(m.a(x))), **two()),
        X,
        "cutting 'a'.*'randn_like'",
    ),
    "recurrent layer that reads units along time": (
        lambda: Written(
            lambda m, x: m.b(m.r(m.a(x).transpose(1, 2))[0]),
            **two(r=nn.LSTM(4, 6, batch_first=True)),
        ),
        SEQUENCE,
        r"'lstm' in module 'r' \(LSTM\): units lie along another axis.*whole=\('a',\)",
    ),
    "convolution along units": (
        lambda: Written(lambda m, x: m.b(m.c(m.a(x))), **two(c=nn.Conv1d(4, 3, 3, padding=1))),
        SEQUENCE,
        r"'conv1d' in module 'c' \(Conv1d\): units lie along another axis",
    ),
    "bilinear layer": (
        lambda: Written(lambda m, x: m.b(x, m.a(x)), a=nn.Linear(5, 6), b=nn.Bilinear(5, 6, 2)),
        X,
        "'_trilinear' in module 'b'",
    ),
    "permuted units": (
        lambda: Written(
            lambda m, x: m.c(m.b(m.a(x)) + m.a(x).flip(-1)),
            a=nn.Linear(5, 6),
            b=nn.Linear(6, 6),
            c=nn.Linear(6, 2),
        ),
        X,
        "another order",
    ),
    "an example that does not fit": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)),
        X,
        r"module '0' \(Linear\) cannot run on the example",
    ),
}
"""What must be refused, and the sentence that must name it."""


class Standardised(nn.Conv2d):
    """A convolution of NF-ResNets: its weights are standardised before every use."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        gain = (0.3 * self.gain).view(-1)
        weight = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


def normed(layer, dim=0):
    return nn.utils.parametrizations.weight_norm(layer, dim=dim)


def by_einsum(m, x):
    q, k, v = (layer(x).unflatten(-1, (m.heads, -1)) for layer in (m.q, m.k, m.v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
    return m.o(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


def by_registers(m, x):
    tokens = torch.cat([m.tokens.expand(len(x), -1, -1), m.a(x)], 1)
    turned = torch.cat([tokens[:, : m.count], 2 * tokens[:, m.count :]], 1)
    weights = (turned @ tokens.transpose(1, 2)).softmax(-1)
    return m.b((weights @ tokens)[:, m.count :])


def by_parts(m, x):
    parts = m.a(x)
    parts = parts.view(len(x), m.parts, parts.shape[1] // m.parts, *parts.shape[2:])
    weights = parts.mean((3, 4), keepdim=True).softmax(1)
    return m.b((weights * parts).sum(1))


def by_selection(m, x):
    paths = torch.stack([m.a(x), m.c(x)], 1)
    weights = m.select(paths.sum(1).mean((2, 3)))
    weights = weights.view(len(x), m.paths, weights.shape[1] // m.paths, 1, 1).softmax(1)
    return m.b((weights * paths).sum(1))


ACCEPTED = {
    "paths that are stacked and selected": (
        lambda: Written(
            by_selection,
            a=nn.Conv2d(3, 6, 1),
            c=nn.Conv2d(3, 6, 1),
            select=nn.Linear(6, 12),
            b=nn.Conv2d(6, 2, 1),
            paths=2,
        ),
        PICTURE,
        {"a": 6},
    ),
    "registers that are counted": (
        lambda: Written(by_registers, **two(tokens=nn.Parameter(torch.randn(1, 3, 6)), count=3)),
        SEQUENCE,
        {"tokens": 6},
    ),
    "softmax over parts that are counted": (
        lambda: Written(by_parts, a=nn.Conv2d(3, 12, 1), b=nn.Conv2d(6, 2, 1), parts=2),
        PICTURE,
        {"a": 6},
    ),
    "unfolded and folded again": (
        lambda: Written(
            lambda m, x: m.b(
                F.fold(F.unfold(m.a(x), 3, padding=1, stride=2), 8, 3, padding=1, stride=2)
            ),
            a=nn.Conv2d(3, 6, 1),
            b=nn.Conv2d(6, 2, 1),
        ),
        PICTURE,
        {"a": 6},
    ),
    "positions that are stretched": (
        lambda: Written(
            lambda m, x: m.b(m.a(x) + F.interpolate(m.places, x.shape[2:], mode="bilinear")),
            a=nn.Conv2d(3, 6, 1),
            b=nn.Conv2d(6, 2, 1),
            places=nn.Parameter(torch.randn(1, 6, 4, 4)),
        ),
        PICTURE,
        {"a": 6},
    ),
    "positions that are looked up as one-hot": (
        lambda: Written(
            lambda m, x: m.b(
                m.a(x)
                + F.one_hot(torch.arange(x.shape[1]), num_classes=m.most).to(m.table) @ m.table
            ),
            **two(table=nn.Parameter(torch.randn(9, 6)), most=9),
        ),
        SEQUENCE,
        {"a": 6},
    ),
    "a convolution over something else than units": (
        lambda: Written(lambda m, x: m.b(m.c(m.a(x))), **two(c=nn.Conv1d(4, 3, 1))),
        SEQUENCE,
        {"a": 6},
    ),
    "sigmoid into a layer that is cut": (
        lambda: Written(lambda m, x: m.b(m.a(x).sigmoid()), **two()),
        X,
        {"a": 6},
    ),
    "softmax of the outputs": (
        lambda: Written(lambda m, x: m.b(m.a(x).relu()).softmax(-1), **two()),
        X,
        {"a": 6},
    ),
    "mean over units": (
        lambda: Written(
            lambda m, x: m.a(x).mean(-1, True) * m.b(x), a=nn.Linear(5, 6), b=nn.Linear(5, 2)
        ),
        X,
        {"a": 6},
    ),
    "a norm by hand": (
        lambda: Written(
            lambda m, x: m.b(
                (y := m.a(x)) - y.mean(-1, keepdim=True) / (y.std(-1, keepdim=True) + 1e-6)
            ),
            **two(),
        ),
        X,
        {"a": 6},
    ),
    "gates": (
        lambda: Written(lambda m, x: m.b(F.glu(m.a(x))), a=nn.Linear(5, 8), b=nn.Linear(4, 2)),
        X,
        {"a": 4},
    ),
    "halves": (
        lambda: Written(
            lambda m, x: m.b(torch.maximum(*m.a(x).chunk(2, 1))),
            a=nn.Linear(5, 8),
            b=nn.Linear(4, 2),
        ),
        X,
        {"a": 4},
    ),
    "a written size": (
        lambda: Written(
            lambda m, x: m.b(m.a(x).view(3, 2, 3).sum(1)), a=nn.Linear(5, 6), b=nn.Linear(3, 2)
        ),
        X,
        {},
    ),
    "a free size": (
        lambda: Written(
            lambda m, x: m.b(m.a(x).view(3, 2, -1).sum(1)), a=nn.Linear(5, 6), b=nn.Linear(3, 2)
        ),
        X,
        {"a": 3},
    ),
    "a slice": (
        lambda: Written(lambda m, x: m.b(m.a(x)[:, 2:]), a=nn.Linear(5, 8), b=nn.Linear(6, 2)),
        X,
        {"a": 6},
    ),
    "picked units": (
        lambda: Written(lambda m, x: m.b(m.a(x)[:, [0, 2]]), a=nn.Linear(5, 8), b=nn.Linear(2, 2)),
        X,
        {},
    ),
    "a table of places": (
        lambda: Written(
            lambda m, x: m.b(m.a(x) + m.p[:, : x.shape[1]]),
            **two(p=nn.Parameter(torch.randn(1, 9, 6))),
        ),
        SEQUENCE,
        {"a": 6},
    ),
    "weights without layers": (
        lambda: Written(
            lambda m, x: (x @ m.v).relu() @ m.w,
            v=nn.Parameter(torch.randn(5, 6)),
            w=nn.Parameter(torch.randn(6, 2)),
        ),
        X,
        {"v": 6},
    ),
    "a start of its own size": (
        lambda: Written(
            lambda m, x: m.b(m.a(x) + m.c(torch.zeros(len(x), m.size))),
            **two(c=nn.Linear(6, 6), size=6),
        ),
        X,
        {"a": 6, "c": 6},
    ),
    "a shared layer": (
        lambda: Written(lambda m, x: m.b(m.c(m.c(m.a(x)).relu())), **two(c=nn.Linear(6, 6))),
        X,
        {"a": 6},
    ),
    "padded channels": (
        lambda: Written(
            lambda m, x: m.b(F.pad(m.a(x), (0, 0, 0, 0, 2, 2)) + m.c(x)),
            a=nn.Conv2d(3, 4, 1),
            c=nn.Conv2d(3, 8, 1),
            b=nn.Conv2d(8, 2, 1),
        ),
        PICTURE,
        {"a": 4},
    ),
    "shuffled channels": (
        lambda: nn.Sequential(nn.Conv2d(3, 12, 1), nn.ChannelShuffle(3), nn.Conv2d(12, 2, 1)),
        PICTURE,
        {"0": 4},
    ),
    "shuffled pixels": (
        lambda: nn.Sequential(nn.Conv2d(3, 12, 1), nn.PixelShuffle(2), nn.Conv2d(3, 2, 1)),
        PICTURE,
        {"0": 3},
    ),
    "unflattened channels": (
        lambda: nn.Sequential(
            nn.Linear(5, 24), nn.Unflatten(1, (6, 2, 2)), nn.ConvTranspose2d(6, 2, 2)
        ),
        X,
        {"0": 6},
    ),
    "norms without weights": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 1),
            nn.GroupNorm(4, 8, affine=False),
            nn.Conv2d(8, 6, 1),
            nn.BatchNorm2d(6, affine=False),
            nn.Conv2d(6, 2, 1),
        ),
        PICTURE,
        {"0": 4, "2": 6},
    ),
    "a layer norm without weights": (
        lambda: nn.Sequential(
            nn.Linear(5, 8), nn.LayerNorm(8, elementwise_affine=False), nn.Linear(8, 2)
        ),
        X,
        {"0": 8},
    ),
    "a grouped transposed convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 1), nn.ConvTranspose2d(6, 12, 2, groups=3), nn.Conv2d(12, 2, 1)
        ),
        PICTURE,
        {"0": 3},
    ),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Conv1d(6, 2, 1)),
        (3, 4, 8),
        {"0": 6},
    ),
    "attention with other keys": (
        lambda: Written(
            lambda m, x: m.o(m.m(m.a(x), m.c(x), m.c(x))[0]),
            a=nn.Linear(5, 8),
            c=nn.Linear(5, 6),
            m=nn.MultiheadAttention(8, 4, kdim=6, vdim=6, batch_first=True),
            o=nn.Linear(8, 2),
        ),
        SEQUENCE,
        {"a": 4, "c": 6, "m.out_proj": 8},
    ),
    "attention by einsum": (
        lambda: Written(
            by_einsum, **{key: nn.Linear(5, 8) for key in "qkv"}, o=nn.Linear(8, 2), heads=4
        ),
        SEQUENCE,
        {"q": 4},
    ),
    "float32 on purpose": (
        lambda: Written(lambda m, x: m.b(m.a(x).float().relu().to(torch.float32)), **two()),
        X,
        {"a": 6},
    ),
    "several outputs": (
        lambda: Written(
            lambda m, x: {"one": m.b(m.a(x)), "two": [m.c(m.a(x))]}, **two(c=nn.Linear(6, 3))
        ),
        X,
        {"a": 6},
    ),
    "hard swish": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Hardswish(inplace=True), nn.Conv2d(6, 2, 1)),
        PICTURE,
        {"0": 6},
    ),
    "log sigmoid": (lambda: Written(lambda m, x: m.b(F.logsigmoid(m.a(x))), **two()), X, {"a": 6}),
    "weight norm of linear layers": (
        lambda: nn.Sequential(
            normed(nn.Linear(5, 6, bias=False)), nn.ReLU(), normed(nn.Linear(6, 2, bias=False))
        ),
        X,
        {"0": 6},
    ),
    "weight norm of rows, columns and the whole": (
        lambda: nn.Sequential(
            normed(nn.Conv2d(3, 6, 3)),
            normed(nn.Conv2d(6, 5, 3), dim=1),
            normed(nn.Conv2d(5, 4, 3), dim=None),
            nn.Conv2d(4, 2, 1),
        ),
        PICTURE,
        {"0": 6, "1": 5, "2": 4},
    ),
    "standardised weights": (
        lambda: nn.Sequential(
            Standardised(3, 6, 3), nn.ReLU(), Standardised(6, 5, 3), nn.Conv2d(5, 2, 1)
        ),
        PICTURE,
        {"0": 6, "2": 5},
    ),
    "a convolution with named arguments": (
        lambda: Written(
            lambda m, x: m.b(F.conv1d(y := m.a(x), weight=m.w, groups=y.shape[1])),
            a=nn.Conv1d(4, 6, 1),
            b=nn.Conv1d(6, 2, 1),
            w=nn.Parameter(torch.randn(6, 1, 3)),
        ),
        (3, 4, 8),
        {"a": 6},
    ),
    "halves with named arguments": (
        lambda: Written(
            lambda m, x: m.b(torch.maximum(*torch.chunk(input=m.a(x), chunks=2, dim=1))),
            a=nn.Linear(5, 8),
            b=nn.Linear(4, 2),
        ),
        X,
        {"a": 4},
    ),
    "pixels shuffled with named arguments": (
        lambda: Written(
            lambda m, x: m.b(F.pixel_shuffle(input=m.a(x), upscale_factor=2)),
            a=nn.Conv2d(3, 12, 1),
            b=nn.Conv2d(3, 2, 1),
        ),
        PICTURE,
        {"a": 3},
    ),
    "nothing to cut": (lambda: nn.Linear(5, 2), X, {}),
}
"""What must be found: the groups by name, with their sizes."""
