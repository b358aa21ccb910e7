"""A plain torch loop whose AdamW keeps its moments on NVMe.

python plain_torch.py --nvme-path /nvme
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import zero


def main() -> None:
    """Train, save, and go on from what was saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", required=True, help="a folder on the NVMe drive")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, and loaded first if it is there")
    given = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Linear(64, given.width), nn.GELU(), nn.Linear(given.width, 64)).to(device)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = zero.OffloadOptimizer(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        torch.optim.AdamW,
        lr=1e-2,
        offload={"device": "nvme", "nvme_path": given.nvme_path},
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    if given.checkpoint is not None and given.checkpoint.exists():
        saved = torch.load(given.checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # torch.optim.AdamW could load it too
        schedule.load_state_dict(saved["schedule"])

    for step in range(given.steps):
        batch = torch.randn(32, 64, device=device)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item():.4f}")

    if given.checkpoint is not None:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
        torch.save(saved, given.checkpoint)
    optimizer.close()


if __name__ == "__main__":
    main()
