"""A loop on several processes, wrapped by hand: `ranks.py fsdp2`, or `ranks.py ddp` and options of DDP.

`ranks.py fsdp2 meta` makes the weights after they are sharded.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

on_card = torch.cuda.is_available()
dist.init_process_group("nccl" if on_card else "gloo")
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_card else torch.device("cpu")
torch.manual_seed(0)
with torch.device("meta" if "meta" in sys.argv else device):
    blocks = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
    model = nn.Sequential(nn.Linear(64, 256), *blocks, nn.BatchNorm1d(256), nn.Linear(256, 11))
if sys.argv[1] == "ddp":
    model = DistributedDataParallel(model, device_ids=[0] if on_card else None, **dict.fromkeys(sys.argv[2:], True))
else:
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
if "meta" in sys.argv:
    model.to_empty(device=device)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = TensorDataset(torch.randn(512, 64), torch.randint(11, (512,)))
for inputs, labels in DataLoader(rows, 32, sampler=DistributedSampler(rows)):
    loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
