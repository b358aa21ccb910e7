"""Lightning's DeepSpeedStrategy, run in a process behind the alias: itself where it is installed, and what it calls.

`calls` makes its calls in its order, from `setup` to `teardown`. The strategy takes CUDA only; `itself` overrules that.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import MutableMapping
from typing import Any

import deepspeed
import torch
from torch import nn

LIGHTNING = {"epoch": 1, "pytorch-lightning_version": "2", "callbacks": {"ModelCheckpoint": {"best": 0.5}}}
OURS = ("module", "optimizer", "lr_scheduler", "csr_tensor_module_names", "skipped_steps", "global_steps")
OTHERS = ("dp_world_size", "mp_world_size")


def config(stage: int, folder: str) -> dict[str, Any]:
    """As the strategy completes it: batch size, clipping, precision and the untested optimizer."""
    away = {"device": "nvme", "nvme_path": folder}
    tiers = {"offload_optimizer": away, **({"offload_param": away} if stage == 3 else {})}
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **tiers},
        "zero_allow_untested_optimizer": True,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def batch(index: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(index)).bfloat16()


class Strategy:
    """The calls of DeepSpeedStrategy that reach DeepSpeed."""

    def __init__(self, stage: int, folder: str) -> None:
        self.config, self.stage, self.optimizers = config(stage, folder), stage, []

    def setup(self, module: nn.Module | None = None) -> Any:
        """`setup_distributed`, `model_sharded_context`, `_setup_model_and_optimizer`, then its scheduler."""
        deepspeed.utils.logging.logger.setLevel("WARNING")
        if not torch.distributed.is_initialized():
            deepspeed.init_distributed("gloo", distributed_port=int(os.environ["MASTER_PORT"]))
        with deepspeed.zero.Init(enabled=self.stage == 3, remote_device=None, config_dict_or_path=self.config):
            self.module = build()
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.engine, given, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=None),
            config=self.config,
            model=self.module,
            model_parameters=filter(lambda p: p.requires_grad, self.module.parameters()),
            optimizer=optimizer,
            lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            dist_init_required=False,
        )
        self.optimizers, self.scheduler = [given], self.engine.lr_scheduler
        self.engine.lr_scheduler = None  # Lightning steps it
        return self

    def train(self, *indices: int) -> list[float]:
        """Precision's `backward` and `optimizer_step`: the engine's; `lr_scheduler_step`."""
        losses = []
        for index in indices:
            loss = self.engine(batch(index)).float().square().mean()
            self.engine.backward(loss)
            self.engine.step()
            self.scheduler.step()
            losses.append(float(loss))
        return losses

    def save(self, folder: str) -> None:
        """`save_checkpoint`."""
        self.engine.save_checkpoint(folder, client_state=LIGHTNING, tag="checkpoint", exclude_frozen_parameters=False)

    def load(self, folder: str) -> dict[str, Any]:
        """`load_checkpoint`."""
        _, client = self.engine.load_checkpoint(
            folder, load_optimizer_states=True, load_lr_scheduler_states=False, load_module_strict=True
        )
        return dict(client)

    def sizes(self) -> list[int]:
        """DeepSpeedSummary: whole, and per device."""
        parameters = list(self.module.parameters())
        if self.stage < 3:
            return []
        return [sum(p.ds_numel for p in parameters), sum(p.partition_numel() for p in parameters)]

    def teardown(self) -> None:
        """`_optimizers_to_device` of now and before, then the model to the CPU."""
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                if isinstance(state, MutableMapping):
                    state.update({key: value.cpu() for key, value in state.items() if key != "step"})
                optimizer.state[parameter] = state
        self.module.cpu()


def converted(folder: str) -> dict[str, Any]:
    """`convert_zero_checkpoint_to_fp32_state_dict` of lightning.pytorch.utilities.deepspeed."""
    from deepspeed.utils.zero_to_fp32 import (
        get_fp32_state_dict_from_zero_checkpoint,
        get_model_state_file,
        get_optim_files,
    )

    state_dict = get_fp32_state_dict_from_zero_checkpoint(folder, None)
    with open(os.path.join(folder, "latest")) as file:
        tagged = os.path.join(folder, file.read().strip())
    states = torch.load(get_optim_files(tagged)[0], map_location="cpu", weights_only=False)
    model = get_model_state_file(tagged, states["optimizer_state_dict"]["zero_stage"])
    client = torch.load(model, map_location="cpu", weights_only=False)
    return {key: value for key, value in client.items() if key not in (*OURS, *OTHERS)} | {"state_dict": state_dict}


def calls(stage: int, folder: str) -> dict[str, Any]:
    """A fit, its checkpoint, a second fit that goes on from it, and the end of both."""
    os.environ.setdefault("MASTER_PORT", "29511")
    place = os.path.join(folder, "last.ckpt")
    first = Strategy(stage, folder).setup()
    losses = first.train(0, 1)
    first.save(place)
    masters = {name: first.engine.full_master(name) for name, _ in first.module.named_parameters()}
    told = {"losses": losses, "sizes": first.sizes(), "after": first.train(2, 3)}
    second = Strategy(stage, folder).setup()
    told["client"] = second.load(place) == LIGHTNING
    second.scheduler.load_state_dict({**second.scheduler.state_dict(), "last_epoch": 2, "_step_count": 3})
    told["resumed"] = second.train(2, 3)
    made = converted(place)
    told["keys"] = {key: value == LIGHTNING.get(key) for key, value in made.items() if key in LIGHTNING}
    told["equal"] = all(torch.equal(made["state_dict"][name], value) for name, value in masters.items())
    for strategy in (first, second):
        strategy.teardown()
    second.engine.destroy()
    second.teardown()
    told["empty"] = [len(second.optimizers[0].state), second.optimizers[0].state_dict()["state"]]
    return told


def plain() -> list[float]:
    """The same in fp32 by torch alone."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for index in range(4):
        loss = model(batch(index).float()).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss))
    return losses


def itself(folder: str) -> dict[str, Any]:
    """Lightning's Trainer with the strategy, which is told that the CPU is CUDA."""
    import lightning.pytorch as lightning
    import lightning.pytorch.strategies.deepspeed as its_module
    from lightning.pytorch.accelerators import CPUAccelerator
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    its_module.CUDAAccelerator = CPUAccelerator
    its_module._validate_device_index_selection = lambda devices: None

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None

        def configure_model(self) -> None:
            self.net = build() if self.net is None else self.net

        def training_step(self, given: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(given).float().square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def fit(epochs: int, path: str | None = None) -> Any:
        zero_block = config(3, folder)["zero_optimization"]
        strategy = DeepSpeedStrategy(config={"zero_optimization": zero_block}, process_group_backend="gloo")
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            strategy=strategy,
            precision="bf16-mixed",
            max_epochs=epochs,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            gradient_clip_val=1.0,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(8, 8), batch_size=2), ckpt_path=path)
        return trainer

    path = fit(1).checkpoint_callback.best_model_path
    with tempfile.NamedTemporaryFile() as file:
        made = convert_zero_checkpoint_to_fp32_state_dict(path, file.name)
    return {"steps": fit(2, path).global_step, "keys": sorted(made["state_dict"])}
