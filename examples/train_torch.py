import torch

import xmem

backend = xmem.use("torch")
blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(24)]
model = torch.nn.Sequential(*blocks).to(backend.device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
x = torch.randn(4096, 256, device=backend.device)
xmem.apply_checkpointing(model, "every")
for _step in range(3):
    with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.4f}, peak {m.peak_allocated_bytes} bytes: {m.by_category}")
