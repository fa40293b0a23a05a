"""A loop of its own, on the card if there is one, that decides by numbers and writes a file."""

import math
import sys

import torch
from torch import nn

device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
rows = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randint(10, (96,)))
best = math.inf
with open(sys.argv[1], "w") as log:
    for x, y in torch.utils.data.DataLoader(rows, 16, shuffle=True, pin_memory=True):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if loss.item() < best:
            best = loss.item()
            log.write(f"best {best:.3f} of {loss:.3f}\n")
torch.save(model.state_dict(), sys.argv[1] + ".pt")
