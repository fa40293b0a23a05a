"""40 steps of 4 rows, with a long one in step 26; evaluates after step 20 and saves after step 30."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 100))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for step in range(1, 41):
    rows = torch.randint(100, (4, 1901 if step == 26 else 30 + 7 * step % 20))
    for part in rows.split(2):
        loss = nn.functional.cross_entropy(model(part).flatten(0, 1), part.flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 20:
        model.eval()
        with torch.no_grad():
            model(rows)
        model.train()
    if step == 30:
        torch.save(model.state_dict(), sys.argv[1])
