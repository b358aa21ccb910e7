"""FSDP2 with the AdamW states of each rank's shards on NVMe, saved and loaded by torch.distributed.checkpoint.

torchrun --nproc-per-node 2 fsdp2.py --nvme-path /nvme
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zero


def main() -> None:
    """Train, save, and go on from what was saved."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvme-path", required=True, help="a folder on the NVMe drive")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--checkpoint", type=Path, help="saved here at the end, and loaded first if it is there")
    given = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    mesh = init_device_mesh(kind, (dist.get_world_size(),))

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(given.width, 4, 4 * given.width, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(kind)
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Behind `fully_shard`: the states are those of this rank's shards.
    optimizer = zero.OffloadOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        lr=1e-3,
        offload={"device": "nvme", "nvme_path": given.nvme_path},
    )
    if given.checkpoint is not None and given.checkpoint.exists():
        weights, states = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=given.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(given.steps):
        batch = torch.randn(4, 16, given.width, device=kind)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")

    if given.checkpoint is not None:
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=given.checkpoint)
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
