"""A plain PyTorch GPT: 24 layers of width 128, as a user would write it."""

import gc

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        split = self.project(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        a = self.output(a.transpose(1, 2).reshape(batch, length, width))
        x = x + functional.dropout(a, self.dropout, self.training)
        h = self.contract(functional.gelu(self.expand(self.norm2(x))))
        return x + functional.dropout(h, self.dropout, self.training)


class GPT(nn.Module):
    def __init__(self, layers=24, width=128, heads=4, vocabulary=1000, length=128, dropout=0.1):
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(Layer(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.token(ids) + self.position[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def forward_and_backward(model, ids, targets):
    # the logits are not kept in a variable: they would live through backward
    loss = functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    loss.backward()
    return float(loss.detach())


def peak_bytes(model, ids):
    """Return how far forward and backward raise the peak, with gradients there already."""
    import xmem

    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    forward_and_backward(model, ids, ids)
    gc.collect()
    with xmem.measure(model=model, inputs=ids) as m:
        forward_and_backward(model, ids, ids)
    return m.peak_above_static_bytes
