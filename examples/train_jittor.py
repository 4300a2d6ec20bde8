import xmem

backend = xmem.use("jittor")  # before Jittor is imported: this prepares its environment
import jittor as jt  # noqa: E402

blocks = [jt.nn.Sequential(jt.nn.Linear(256, 256), jt.nn.GELU()) for _ in range(24)]
model = jt.nn.Sequential(*blocks)
optimizer = jt.optim.Adam(model.parameters(), lr=1e-3)
x = jt.randn(4096, 256)
xmem.apply_checkpointing(model, "every")
for _step in range(3):
    with xmem.measure(model=model, optimizer=optimizer, inputs=x) as m:
        loss = ((model(x) - x) ** 2).mean()
        optimizer.step(loss)
    print(f"loss {loss.item():.4f}, peak {m.peak_allocated_bytes} bytes: {m.by_category}")
