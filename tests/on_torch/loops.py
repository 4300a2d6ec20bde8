"""Models on PyTorch that call their blocks in many ways."""

import random

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x, scale=1.0, *, shift=None):
        self.calls += 1
        y = self.dropout(torch.tanh(self.norm(self.layer(x)))) * scale
        return y if shift is None else y + shift


class Loop(nn.Module):
    """Calls its blocks by itself, in one of several ways."""

    def __init__(self, how="plain", depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.how = how
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.blocks):
            if self.how == "arguments":
                x = block(x, i / 2, shift=self.shift)
            elif self.how == "residual":
                x = x + block(x)
            elif self.how == "skips":
                x = block(x)
                kept.append(x)
            elif self.how == "random depth":
                x = block(x) if random.random() < 0.6 else x
            elif self.how == "no_grad first":
                with torch.set_grad_enabled(i > 2):
                    x = block(x)
            elif self.how == "autocast in between":
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=i % 3 == 1):
                    x = block(x).float()
            elif self.how == "read without gradients":
                x = block(x)
                with torch.no_grad():
                    float(x.sum())
            elif self.how == "read in inference mode":
                x = block(x)
                with torch.inference_mode():
                    float(x.sum())
            elif self.how == "read after autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    x = block(x)
                x = x.float()
            elif self.how == "read in another autocast":
                x = block(x)
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    x = x * 1.0
            elif self.how == "unread":
                block(x)
                x = block(x)
            elif self.how == "unread at the end":
                x = block(x)
                if i == 2:
                    block(x)
                    x = x.detach()
            elif self.how == "modes":
                block.eval()
                x = block(x)
                block.train()
                block.dropout.train(i % 2 == 0)
            elif self.how == "early exit":
                x = block(x)
                if i == 3:
                    break
            elif self.how == "text":
                x = block(x)
                assert "Tensor" in type(x).__name__ or x.shape[0] == 8
            else:
                x = block(x)
        return x + sum(kept[:-1]) if kept else x


HOWS = [
    "plain", "arguments", "residual", "skips", "random depth", "no_grad first",
    "autocast in between", "early exit", "text",
    "read without gradients", "read in inference mode", "read after autocast",
    "read in another autocast", "unread", "unread at the end", "modes",
]  # fmt: skip


def run(model, x):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    random.seed(1)
    y = model(x)
    y.square().sum().backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [y.detach(), *gradients, *(b.clone() for b in model.buffers())]


def same(found, expected):
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )
