"""Models as other people write them, small, which `trace` must understand whole."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class VGG(nn.Module):
    """Convolutions with batch norm, pooled and flattened into three linear layers with drop-out."""

    def __init__(self):
        super().__init__()
        layers, channels = [], 3
        for width in (6, "pool", 8, "pool", 10, 10, "pool"):
            if width == "pool":
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                channels = width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(
            nn.Linear(channels * 4, 12),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(12, 9),
            nn.ReLU(True),
            nn.Dropout(),
            nn.Linear(9, 5),
        )

    def forward(self, x):
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with an identity or a projected shortcut, as in ResNet-50 (and, with groups,
    ResNeXt-50).
    """

    def __init__(self, fan_in, width, stride=1, groups=1):
        super().__init__()
        out = 2 * width
        self.conv1, self.bn1 = nn.Conv2d(fan_in, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, groups=groups, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or fan_in != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(fan_in, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """A stem with max pooling, stages of bottlenecks, global average pooling and a linear head."""

    def __init__(self, groups=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(
            Bottleneck(6, 4, groups=groups), Bottleneck(8, 4, groups=groups)
        )
        self.layer2 = nn.Sequential(Bottleneck(8, 8, 2, groups), Bottleneck(16, 8, groups=groups))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 5)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class InvertedResidual(nn.Module):
    """Expand, filter each channel by itself, project; added to the input where shapes allow, as in
    MobileNetV2.
    """

    def __init__(self, fan_in, out, stride, expand):
        super().__init__()
        hidden = fan_in * expand
        self.use_res_connect = stride == 1 and fan_in == out
        self.conv = nn.Sequential(
            nn.Conv2d(fan_in, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(inplace=True),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(True),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x):
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


class MobileNetV2(nn.Module):
    """Inverted residuals between a stem and a wide last convolution."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU6(inplace=True),
            InvertedResidual(4, 6, 1, 2),
            InvertedResidual(6, 6, 1, 3),
            InvertedResidual(6, 8, 2, 2),
            nn.Conv2d(8, 12, 1, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU6(inplace=True),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(12, 5))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


class Attention(nn.Module):
    """Fused queries, keys and values, as in DeiT: the heads are an axis of their own."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x):
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B, N, -1)
        return self.proj(x)


class ViTBlock(nn.Module):
    """Attention and a perceptron, each after a layer norm and added to the stream."""

    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn, self.norm2 = (
            nn.LayerNorm(dim),
            Attention(dim, heads),
            nn.LayerNorm(dim),
        )
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.gamma * self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Patches, a class token, learned positions, blocks, and a head on the token."""

    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, dim) * 0.02)
        self.blocks = nn.ModuleList(ViTBlock(dim, heads) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 5)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class CausalSelfAttention(nn.Module):
    """Attention as in nanoGPT: as wide inside as the stream, split by the width that the module
    keeps.
    """

    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd, self.dropout = n_head, n_embd, 0.1

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class FreeAttention(nn.Module):
    """Attention that takes its width from its own tensors, so that heads and stream are
    cut apart.
    """

    def __init__(self, n_embd, num_heads):
        super().__init__()
        self.qkv, self.proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.num_heads = num_heads
        self.register_buffer(
            "mask", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8), persistent=False
        )

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(B, T, self.num_heads, -1).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, -1))


class GPTBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, n_embd, n_head, attention):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = (
            nn.LayerNorm(n_embd),
            attention(n_embd, n_head),
            nn.LayerNorm(n_embd),
        )
        self.c_fc, self.c_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """A small language model whose head is its token table."""

    def __init__(self, attention=CausalSelfAttention, vocab=11, block_size=8, n_embd=12, n_head=3):
        super().__init__()
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(vocab, n_embd), nn.Embedding(block_size, n_embd)
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList(GPTBlock(n_embd, n_head, attention) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(n_embd), nn.Linear(n_embd, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx):
        _, t = idx.size()
        assert t <= self.block_size
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(0, t, device=idx.device)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class Llama(nn.Module):
    """Grouped queries, rotary positions, a hand-written RMS norm and a gated perceptron."""

    class Norm(nn.Module):
        """The root mean square norm as Llama writes it."""

        def __init__(self, dim):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(dim))

        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def __init__(self, vocab=11, dim=16, heads=4, kv_heads=2):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.n_rep = heads // kv_heads
        self.tok = nn.Embedding(vocab, dim)
        self.norm1, self.norm2, self.norm3 = self.Norm(dim), self.Norm(dim), nn.RMSNorm(dim)
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 24, bias=False), nn.Linear(dim, 24, bias=False)
        self.w2, self.out = nn.Linear(24, dim, bias=False), nn.Linear(dim, vocab, bias=False)

    def rotate(self, x):
        angles = torch.outer(torch.arange(x.shape[2]).to(x), torch.tensor([1.0, 0.1]).to(x))
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat(
            [a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], dim=-1
        )

    def repeat(self, x):
        b, h, t, d = x.shape
        return x[:, :, None, :, :].expand(b, h, self.n_rep, t, d).reshape(b, h * self.n_rep, t, d)

    def forward(self, idx):
        x = self.tok(idx)
        b, t, _ = x.shape
        h = self.norm1(x)
        q = self.rotate(self.wq(h).view(b, t, self.n_heads, self.head_dim).transpose(1, 2))
        k = self.rotate(self.wk(h).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2))
        v = self.wv(h).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        x = x + self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))
        h = self.norm2(x)
        x = x + self.w2(F.silu(self.w1(h)) * self.w3(h))
        return self.out(self.norm3(x))


class Encoder(nn.Module):
    """Torch's own transformer layers, which are as wide inside as outside."""

    def __init__(self, dim=12, heads=3):
        super().__init__()
        self.embed = nn.Linear(5, dim)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 16, batch_first=True, norm_first=first)
            for first in (True, False)
        )
        self.head = nn.Linear(dim, 4)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


class UNet(nn.Module):
    """Down and up again with group norm, concatenated skips and a transposed convolution."""

    def __init__(self):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.down2 = nn.Sequential(
            nn.Conv2d(8, 12, 3, 2, 1), nn.InstanceNorm2d(12), nn.LeakyReLU(0.1)
        )
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.mix = nn.Sequential(nn.Conv2d(14, 10, 3, padding=1), nn.PReLU(10), nn.Dropout2d(0.1))
        self.near, self.out = nn.Upsample(scale_factor=1.0), nn.Conv2d(10, 2, 1)

    def forward(self, x):
        high = self.down1(x)
        low = self.down2(high)
        return self.out(self.near(self.mix(torch.cat([self.up(low), high], dim=1))))


class ConvNeXt(nn.Module):
    """Depth-wise convolution, layer norm over channels at the end, a scaled residual, and squeeze
    and excitation.
    """

    def __init__(self, dim=8):
        super().__init__()
        self.stem, self.dw = nn.Conv2d(3, dim, 2, 2), nn.Conv2d(dim, dim, 3, padding=1, groups=dim)
        self.norm, self.pw1, self.pw2 = (
            nn.LayerNorm(dim),
            nn.Linear(dim, 3 * dim),
            nn.Linear(3 * dim, dim),
        )
        self.gamma = nn.Parameter(0.1 * torch.ones(dim))
        self.squeeze, self.excite = nn.Conv2d(dim, 4, 1), nn.Conv2d(4, dim, 1)
        self.head = nn.Linear(dim, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        y = (self.gamma * self.pw2(F.gelu(self.pw1(y)))).permute(0, 3, 1, 2)
        x = x + y
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return self.head(x.mean((-2, -1)))


class Shuffle(nn.Module):
    """Half of the channels pass, half are filtered; then they are shuffled, as in ShuffleNetV2."""

    def __init__(self):
        super().__init__()
        self.stem, self.branch = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(4, 4, 1)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        x = self.stem(x)
        a, b = x.chunk(2, dim=1)
        x = torch.cat((a, F.relu(self.branch(b))), dim=1)
        B, C, H, W = x.shape
        x = x.view(B, 2, C // 2, H, W).transpose(1, 2).contiguous().view(B, -1, H, W)
        return self.head(x).amax((2, 3))


class Dense(nn.Module):
    """Every layer sees all before it, as in DenseNet."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 + 3 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(4 + 3 * i, 3, 3, padding=1) for i in range(3))
        self.head = nn.Linear(13, 5)

    def forward(self, x):
        x = self.stem(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


IMAGE, WORDS = (3, 3, 8, 8), (3, 6)
ZOO = {
    "vgg": (VGG, IMAGE),
    "resnet": (ResNet, IMAGE),
    "resnext": (lambda: ResNet(groups=2), IMAGE),
    "mobilenet": (MobileNetV2, IMAGE),
    "vit": (ViT, IMAGE),
    "gpt": (GPT, WORDS),
    "gpt_free": (lambda: GPT(FreeAttention), WORDS),
    "llama": (Llama, WORDS),
    "encoder": (Encoder, (3, 4, 5)),
    "unet": (UNet, IMAGE),
    "convnext": (ConvNeXt, IMAGE),
    "shuffle": (Shuffle, IMAGE),
    "dense": (Dense, IMAGE),
}
"""Every model with the shape of an example."""


def zoo(name):
    """A model of the zoo, always with the same weights, and an example for it."""
    make, shape = ZOO[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(), torch.randint(11, shape) if shape is WORDS else torch.randn(shape)
