"""Attention in models of pictures, volumes and proteins, whole: windows, tables of positions, channels, axes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.spelling import hidden, module, noise

WIDTH, HEADS, DIM = 24, 3, 8


class Packed(nn.Module):
    """A packed projection of [batch, len, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, n, _ = x.shape
        return self.qkv(x).reshape(b, n, 3, HEADS, DIM).permute(2, 0, 3, 1, 4).unbind(0)


# ---- windows and tables of relative positions


def table_index(side: int) -> Tensor:
    grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
    offset = (grid[:, :, None] - grid[:, None, :]).permute(1, 2, 0) + side - 1
    return offset[..., 0] * (2 * side - 1) + offset[..., 1]


class Swin(Packed):
    """Windows of a picture, with a table of relative positions; shifted, they have a mask for each window."""

    side, window, shift = 6, 3, 0

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros((2 * self.window - 1) ** 2, HEADS))
        self.register_buffer("index", table_index(self.window))
        if self.shift:
            parts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
            region = torch.zeros(1, self.side, self.side, 1)
            for n, (rows, columns) in enumerate((r, c) for r in parts for c in parts):
                region[:, rows, columns] = n
            region = self.windows(region).view(-1, self.window**2)
            mask = region.unsqueeze(1) - region.unsqueeze(2)
            self.register_buffer("mask", mask.masked_fill(mask != 0, -100.0))

    def windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window * self.window, c)

    def forward(self, x: Tensor) -> Tensor:
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        x = self.windows(x)
        b, n, c = x.shape
        q, k, v = self.split(x)
        attn = (q * DIM**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        attn = attn + bias.unsqueeze(0)
        if self.shift:
            count = self.mask.shape[0]
            attn = attn.view(b // count, count, HEADS, n, n) + self.mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, HEADS, n, n)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


class SwinShifted(Swin):
    shift = 1


class Beit(Packed):
    """A table with entries of its own for the class token; the key has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.table = nn.Parameter(torch.zeros(25 + 3, HEADS))
        index = torch.zeros(10, 10, dtype=torch.long)
        index[1:, 1:] = table_index(3)
        index[0, :], index[:, 0], index[0, 0] = 25, 26, 27
        self.register_buffer("index", index)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias), self.v_bias))
        qkv = F.linear(x, self.qkv.weight, bias).reshape(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * DIM**-0.5, qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1)
        attn = attn + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, -1))


class LeViT(nn.Module):
    """Values wider than keys, a bias for each offset picked on the parameter's last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, HEADS * (8 + 8 + 16))
        self.biases = nn.Parameter(torch.zeros(HEADS, 9))
        points = [(r, c) for r in range(3) for c in range(3)]
        known: dict[tuple[int, int], int] = {}
        index = [known.setdefault((abs(a - e), abs(b - f)), len(known)) for a, b in points for e, f in points]
        self.register_buffer("index", torch.tensor(index).view(9, 9))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, HEADS, -1).split([8, 8, 16], dim=3)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        attn = q @ k * 8**-0.5 + self.biases[:, self.index]
        return (attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, HEADS * 16)


class Sam(Packed):
    """SAM and ViTDet: positions of rows and of columns, each the query times its table, added as a 6-D view."""

    rows, columns = 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.rel_h = nn.Parameter(torch.zeros(2 * self.rows - 1, DIM))
        self.rel_w = nn.Parameter(torch.zeros(2 * self.columns - 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        qkv = self.qkv(x).reshape(b, h * w, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * HEADS, h * w, -1).unbind(0)
        attn = (q * DIM**-0.5) @ k.transpose(-2, -1)
        rows, columns = torch.arange(h), torch.arange(w)
        r_h = self.rel_h[rows[:, None] - rows[None, :] + h - 1]
        r_w = self.rel_w[columns[:, None] - columns[None, :] + w - 1]
        r_q = q.reshape(b * HEADS, h, w, DIM)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, r_h)
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, r_w)
        attn = attn.view(-1, h, w, h, w) + rel_h[:, :, :, :, None] + rel_w[:, :, :, None, :]
        attn = attn.view(-1, h * w, h * w).softmax(dim=-1)
        x = (attn @ v).view(b, HEADS, h, w, -1).permute(0, 2, 3, 1, 4).reshape(b, h, w, -1)
        return self.proj(x)


class BoTNet(nn.Module):
    """[batch, channels, height, width]; relative logits of both axes by padding and reshaping."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Conv2d(WIDTH, 3 * WIDTH, 1, bias=False)
        self.rel_height, self.rel_width = nn.Parameter(torch.zeros(5, DIM)), nn.Parameter(torch.zeros(7, DIM))

    def logits(self, q: Tensor, table: Tensor) -> Tensor:
        b, h, x, y, _ = q.shape
        out = torch.einsum("bhxyd,rd->bhxyr", q, table)
        out = F.pad(out, (0, 1)).flatten(3)
        out = F.pad(out, (0, y - 1)).reshape(b, h, x, y + 1, 2 * y - 1)[..., :y, y - 1 :]
        return out[:, :, :, None].expand(-1, -1, -1, x, -1, -1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, HEADS, DIM, h * w).transpose(-1, -2) for t in self.to_qkv(x).chunk(3, dim=1))
        q = q * DIM**-0.5
        grid = q.reshape(b, HEADS, h, w, DIM)
        across = self.logits(grid, self.rel_width).permute(0, 1, 2, 4, 3, 5).reshape(b, HEADS, h * w, h * w)
        down = self.logits(grid.transpose(2, 3), self.rel_height)
        down = down.permute(0, 1, 4, 2, 5, 3).reshape(b, HEADS, h * w, h * w)
        sim = torch.einsum("bhid,bhjd->bhij", q, k) + across + down
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        return out.transpose(-1, -2).reshape(b, c, h, w)


# ---- channels first


class VaeBlock(nn.Module):
    """The attention block of a latent-diffusion autoencoder: convolutions, and the value times the weights turned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, WIDTH)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(WIDTH, WIDTH, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h_ = self.norm(x)
        q, k, v = self.q(h_), self.k(h_), self.v(h_)
        b, c, h, w = q.shape
        q = q.reshape(b, c, h * w).permute(0, 2, 1)
        k = k.reshape(b, c, h * w)
        w_ = torch.bmm(q, k) * (int(c) ** (-0.5))
        w_ = F.softmax(w_, dim=2).permute(0, 2, 1)
        h_ = torch.bmm(v.reshape(b, c, h * w), w_).reshape(b, c, h, w)
        return x + self.proj_out(h_)


class UNetBlock(nn.Module):
    """Guided diffusion: one convolution for all three, both sides scaled, einsums over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        qkv = self.qkv(x.reshape(b, c, -1))
        q, k, v = qkv.reshape(b * HEADS, DIM * 3, -1).split(DIM, dim=1)
        scale = 1 / math.sqrt(math.sqrt(DIM))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        return torch.einsum("bts,bcs->bct", weight, v).reshape(b, -1, *spatial)


class NonLocal(nn.Module):
    """Embedded Gaussian: half the channels inside, no scale, queries first."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.theta, self.phi = (nn.Conv2d(WIDTH, 12, 1) for _ in range(3))
        self.w = nn.Conv2d(12, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        g = self.g(x).view(b, 12, -1).permute(0, 2, 1)
        theta = self.theta(x).view(b, 12, -1).permute(0, 2, 1)
        phi = self.phi(x).view(b, 12, -1)
        y = torch.matmul(F.softmax(torch.matmul(theta, phi), dim=-1), g)
        return self.w(y.permute(0, 2, 1).contiguous().view(b, 12, *x.shape[2:])) + x


class SelfAttentionGan(nn.Module):
    """SAGAN: keys and values pooled, an eighth of the channels for scores, a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.h = nn.Conv2d(WIDTH, 3, 1), nn.Conv2d(WIDTH, 3, 1), nn.Conv2d(WIDTH, WIDTH, 1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        query = self.f(x).view(b, -1, h * w).permute(0, 2, 1)
        key = F.max_pool2d(self.g(x), 2).view(b, -1, h * w // 4)
        attention = torch.softmax(torch.bmm(query, key), dim=-1)
        value = F.max_pool2d(self.h(x), 2).view(b, -1, h * w // 4)
        out = torch.bmm(value, attention.permute(0, 2, 1)).view(b, c, h, w)
        return self.gamma * out + x


class XCiT(Packed):
    """Cross-covariance: channels look at channels, so that len and head_dim change places."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (t.transpose(-2, -1) for t in self.split(x))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attn = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        return self.proj((attn @ v).permute(0, 3, 1, 2).reshape(b, n, c))


class Restormer(nn.Module):
    """The same over the channels of [batch, channels, height, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Conv2d(WIDTH, 3 * WIDTH, 1, bias=False)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, HEADS, DIM, h * w) for t in self.qkv(x).chunk(3, dim=1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attn = (q @ k.transpose(-2, -1)) * self.temperature
        return (attn.softmax(dim=-1) @ v).reshape(b, c, h, w)


# ---- more than one axis


class Axial(Packed):
    """Rows of a picture, then its columns."""

    def along(self, x: Tensor) -> Tensor:
        b, n, s, c = x.shape
        q, k, v = (t.reshape(b * n, s, HEADS, DIM).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        out = ((q @ k.transpose(-2, -1)) * DIM**-0.5).softmax(-1) @ v
        return out.transpose(1, 2).reshape(b, n, s, c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.along(x)
        return x + self.along(x.transpose(1, 2)).transpose(1, 2)


class AxialEinsum(Packed):
    """The same without folding: axes of a picture stay where they are."""

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        q, k, v = (t.reshape(b, h, w, HEADS, DIM) for t in self.qkv(x).chunk(3, dim=-1))
        rows = torch.einsum("byxhd,byzhd->byhxz", q * DIM**-0.5, k).softmax(-1)
        out = torch.einsum("byhxz,byzhd->byxhd", rows, v)
        columns = torch.einsum("byxhd,bzxhd->bxhyz", q * DIM**-0.5, k).softmax(-1)
        return (out + torch.einsum("bxhyz,bzxhd->byxhd", columns, v)).reshape(b, h, w, c)


class EvoformerRow(nn.Module):
    """Rows of an alignment, [batch, rows, residues, width]: a mask and a bias of each pair, then a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.g = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.pair = nn.Linear(5, HEADS, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        biases = [(1e9 * (mask - 1))[..., :, None, None, :], self.pair(z).permute(0, 3, 1, 2).unsqueeze(-4)]
        q, k, v = (f(m).view(*m.shape[:-1], HEADS, DIM).transpose(-2, -3) for f in (self.q, self.k, self.v))
        q = q / math.sqrt(DIM)
        a = torch.matmul(q, k.transpose(-1, -2))
        for bias in biases:
            a += bias
        o = torch.matmul(torch.softmax(a, dim=-1), v).transpose(-2, -3)
        gate = torch.sigmoid(self.g(m)).view(*m.shape[:-1], HEADS, DIM)
        return self.o((o * gate).flatten(-2))


class Perceiver(nn.Module):
    """Learned queries look at the input and at themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.zeros(5, WIDTH))
        self.to_q, self.to_kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.latents.expand(x.shape[0], -1, -1)
        kv = self.to_kv(torch.cat((x, latents), dim=-2))
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in (self.to_q(latents), *kv.chunk(2, dim=-1)))
        sim = torch.einsum("...id,...jd->...ij", q * DIM**-0.5, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        return torch.einsum("...ij,...jd->...id", sim.softmax(dim=-1), v).transpose(1, 2).flatten(-2)


_G = "pictures and proteins"
_CHANNELS = noise((2, WIDTH, 4, 6))


def _protein(dtype: torch.dtype) -> tuple[Tensor, ...]:
    mask = (torch.arange(7) < torch.tensor([[7, 5, 7, 6]] * 2).unsqueeze(-1)).to(dtype)
    return torch.randn(2, 4, 7, WIDTH).to(dtype), torch.randn(2, 7, 7, 5).to(dtype), mask


VISION = (
    *(module(_G, kind, noise((2, 6, 6, WIDTH))) for kind in (Swin, SwinShifted)),
    module(_G, Beit, hidden(10)),
    module(_G, LeViT, hidden(9)),
    module(_G, Sam, noise((2, 3, 4, WIDTH))),
    module(_G, BoTNet, noise((2, WIDTH, 3, 4))),
    *(module(_G, kind, _CHANNELS) for kind in (VaeBlock, UNetBlock, NonLocal, SelfAttentionGan, Restormer)),
    module(_G, XCiT, hidden()),
    module(_G, Axial, noise((2, 5, 7, WIDTH)), sites=2),
    module(_G, AxialEinsum, noise((2, 5, 7, WIDTH)), sites=2),
    module(_G, EvoformerRow, _protein),
    module(_G, Perceiver, hidden()),
)
