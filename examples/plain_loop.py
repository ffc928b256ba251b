"""A hand-written training loop. `hybrid_loop.py` is the same with three lines changed."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
digits = TensorDataset(torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels))
loader = DataLoader(digits, batch_size=64, shuffle=True, drop_last=True)

model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    images, targets = batch
    return F.cross_entropy(model(images), targets)


for epoch in range(20):
    for batch in loader:
        loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch}: loss {loss.item():.4f}")
