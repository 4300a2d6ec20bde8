"""Holds models in stages to the models themselves, and models with all that tracing meets."""

import copy

import torch
from torch import nn
from torch.nn import functional
from xmem_torch.tracing import traced

import xmem


def plainly(index, function, args, kwargs):
    return function(*args, **kwargs)


def gradients(model, run, *args, **kwargs):
    """Return what a forward gives and its gradients, from one seed."""
    torch.manual_seed(0)
    model.zero_grad()
    inputs = [a for a in args if torch.is_tensor(a) and a.requires_grad]
    for a in inputs:
        a.grad = None
    output = run(*args, **kwargs)
    leaves = [t for t in xmem.containers.leaves(output, torch.Tensor) if t.requires_grad]
    sum(t.square().sum() for t in leaves).backward()
    return output, [t.grad for t in (*model.parameters(), *inputs)]


def same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return a == b


def check(model, *args, names=None, **kwargs):
    """Hold a model's stages to the model itself."""
    stages = traced(model)
    assert stages is not None
    assert len(set(stages.names)) == len(stages.names)
    assert traced(model).names == stages.names == traced(copy.deepcopy(model)).names
    if names is not None:
        assert list(stages.names) == names
    called = []

    def call(index, function, args, kwargs):
        called.append(index)
        output = function(*args, **kwargs)
        if index < len(stages.names) - 1:
            assert isinstance(output, torch.Tensor), stages.names[index]
            own = {t.untyped_storage().data_ptr() for t in args if torch.is_tensor(t)}
            assert output.untyped_storage().data_ptr() not in own, stages.names[index]
            assert output.requires_grad, stages.names[index]
        return output

    run = stages.forward(call)
    assert same(
        gradients(model, stages.forward(call), *args, **kwargs),
        gradients(model, model, *args, **kwargs),
    )
    assert called == list(range(len(stages.names)))
    # Nothing is kept for a second call, and none is missing.
    assert same(gradients(model, run, *args, **kwargs), gradients(model, model, *args, **kwargs))
    return stages


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        if x.shape[1] > 1000:  # what a graph cannot hold
            return x
        return self.relu(x + self.conv2(self.relu(self.norm(self.conv1(x)))))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(8), Residual(8))
        self.layer2 = nn.Sequential(nn.Conv2d(8, 16, 2, 2), Residual(16), Residual(16))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.avgpool(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(x, 1))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1 = Residual(4)
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.Conv2d(4, 8, 1)
        self.down2 = Residual(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.fuse = nn.Conv2d(8, 4, 1)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skip = self.down1(x)
        y = self.up(self.down2(self.widen(self.pool(skip))))
        y = torch.cat([skip, y[..., : skip.shape[2], : skip.shape[3]]], dim=1)
        return self.head(functional.relu(self.fuse(y)))


class NanoGPT(nn.Module):
    """Positions by arange, residuals in the outer forward, dropout as a function, two outputs."""

    def __init__(self, tied=False):
        super().__init__()
        self.token = nn.Embedding(50, 16)
        self.position = nn.Embedding(12, 16)
        self.register_buffer("scale", torch.tensor(0.5))
        self.attention = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, ids, targets=None, *, label_smoothing: float = 0.0):
        batch, length = ids.shape
        where = torch.arange(length, device=ids.device)
        x = self.token(ids) + self.position(where) * self.scale
        x = functional.dropout(x, 0.1, self.training)
        for norm, mix in zip(self.norm, self.attention, strict=True):
            x = x + mix(norm(x)).view(batch, length, -1)
        logits = self.head(x)
        if targets is None:
            return {"logits": logits, "loss": None}
        loss = functional.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.view(-1), label_smoothing=label_smoothing
        )
        return {"logits": logits, "loss": loss}
