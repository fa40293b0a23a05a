"""No optimizer: the weights are changed by hand."""

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Linear(100, 50).to(device)
for _ in range(5):
    loss = model(torch.randn(8, 100, device=device)).pow(2).mean()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
            parameter.grad = None
