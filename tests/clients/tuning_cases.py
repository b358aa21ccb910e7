"""What the tests of TRL, PEFT and LLaMA-Factory run in the clients' processes: scripts as users write them.

Each takes the DeepSpeed config, a dict or None for the plain run, and returns what a user can see: the log, and the
weights that were saved. All models are random and tiny, the tokenizer is made here: no file is fetched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn

Report = dict[str, Any]
LOGGED = ("loss", "grad_norm", "learning_rate")
WARMUP = 3
RATE = 1e-2
SENTENCES = (
    "the parameters live on the disk",
    "a step reads and writes them",
    "what is read ahead is there in time",
    "gradients go where the optimizer is",
    "no byte moves twice without need",
    "the loss is that of a run in memory",
    "tiers are data and not branches",
    "a rank owns a slice of each unit",
)


def tokenizer() -> Any:
    """Bytes as tokens, and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(("<pad>", "<s>", "</s>", *letters))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    inputs = ["input_ids", "attention_mask"]  # before transformers 5 there are types of tokens else
    made = PreTrainedTokenizerFast(tokenizer_object=inner, model_input_names=inputs, **special)
    made.chat_template = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"
    return made


def llama(*, tied: bool = False, dtype: torch.dtype = torch.float32, width: int = 16) -> Any:
    """Two blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer()),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).to(dtype)


def common(deepspeed: dict[str, Any] | str | None, **more: Any) -> dict[str, Any]:
    """Arguments of a short run: 4 steps of 2 micro-batches of 2, logged at each step."""
    return {
        "output_dir": "out",
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "warmup_steps": WARMUP,
        "lr_scheduler_type": "constant_with_warmup",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 0,
        "deepspeed": deepspeed,
        **more,
    }


def kept(ulps: int = 0, **more: Any) -> None:
    """Write a fresh model where the scripts read theirs from."""
    from transformers import set_seed

    set_seed(7)
    moved(llama(**more), ulps).save_pretrained("base")
    wait_for_ranks()  # the first of them writes


def wait_for_ranks() -> None:
    """Where there are several."""
    import torch.distributed as dist

    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def loaded() -> Any:
    """As users load a model; with stage 3 in the arguments that were made before, under `Init`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained("base", dtype="auto")


def moved(model: nn.Module, ulps: int) -> nn.Module:
    """The model with every weight moved by so many units of its last place, up or down by turns.

    What this does to a run is the measure of what another order of the same sums may do.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            if ulps and parameter.is_floating_point():
                signs = torch.ones(parameter.numel()).view_as(parameter)
                signs.view(-1)[::2] = -1
                parameter.mul_(1 + signs * ulps * torch.finfo(torch.float32).eps)
    return model


def schedule(deepspeed: dict[str, Any] | None, model: nn.Module, kind: str | None) -> dict[str, Any]:
    """The plain script's own optimizer and scheduler, where the config would have named them.

    WarmupLR rises with the logarithm of the step, which no scheduler of transformers does, and is one step behind:
    the first two steps have its first value. An optimizer of the config decays every parameter, norms too.
    """
    if deepspeed is not None or kind is None:
        return {}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, RATE, weight_decay=0.1)

    def rise(step: int) -> float:
        return min(math.log(max(step, 1)) / math.log(WARMUP), 1.0)

    return {"optimizers": (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rise))}


def fit(trainer: Any, model: nn.Module) -> Report:
    """Train, save, and tell."""
    output = trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    report: Report = {key: [float(entry[key]) for entry in steps if key in entry] for key in LOGGED}
    report["train_loss"] = output.training_loss
    report["engine"] = type(trainer.model_wrapped).__module__.partition(".")[0]
    trainer.save_model("saved")
    wait_for_ranks()
    report["weights"] = saved("saved")
    report["trainable"] = sorted(n for n, p in model.named_parameters() if p.requires_grad)
    return report


def saved(folder: str | Path) -> dict[str, Tensor]:
    """Everything in the safetensors files of a folder."""
    from safetensors.torch import load_file

    found: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(path)
    return found


# ---- TRL -------------------------------------------------------------------------------------


class Memory:
    """The callback of the tutorials: how much memory there is in use at each step."""

    def __new__(cls) -> Any:
        import psutil
        from transformers import TrainerCallback

        class Callback(TrainerCallback):
            def __init__(self) -> None:
                self.seen: list[int] = []

            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                self.seen.append(psutil.Process().memory_info().rss)

        return Callback()


def sft(
    deepspeed: dict[str, Any] | None = None,
    *,
    ulps: int = 0,
    tied: bool = False,
    own_schedule: str | None = None,
    peft: dict[str, Any] | None = None,
    **more: Any,
) -> Report:
    """SFTTrainer on a few sentences, as in its tutorials."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import SFTConfig, SFTTrainer

    kept(ulps, tied=tied)
    args = SFTConfig(**{"bf16": False, "max_length": 32, **common(deepspeed, **more)})
    set_seed(0)
    model = loaded()
    callback = Memory()
    data = Dataset.from_dict({"text": list(SENTENCES) * 2})
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=data,
        processing_class=tokenizer(),
        callbacks=[callback],
        peft_config=adapters(**peft) if peft is not None else None,
        **schedule(deepspeed, model, own_schedule),
    )
    report = fit(trainer, trainer.model)
    report["memory_bytes"] = callback.seen
    return report


def adapters(kind: str = "LoraConfig", **more: Any) -> Any:
    """A PEFT config on attention and MLP."""
    import peft

    targets = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
    return getattr(peft, kind)(**{**targets, **more})


def old_trl() -> bool:
    """Before 0.29 TRL neither makes a reference model nor computes its values ahead at stage 3."""
    return Version(version("trl")) < Version("0.29")


def dpo(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, **more: Any) -> Report:
    """DPOTrainer with a reference model of its own (an engine that does not train), or its precomputed values."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import DPOConfig, DPOTrainer

    if deepspeed is not None and old_trl():
        import deepspeed as library

        library.init_distributed()  # values computed ahead are gathered before there is an engine
    kept(ulps)
    args = DPOConfig(**{"bf16": False, "max_length": 48, **common(deepspeed, **more)})
    set_seed(0)
    model = loaded()
    rows = zip(SENTENCES, reversed(SENTENCES), strict=True)
    pairs = [{"prompt": a[:9], "chosen": a[9:], "rejected": b[-12:]} for a, b in rows]
    trainer = DPOTrainer(
        model=model,
        ref_model=loaded() if old_trl() and not args.precompute_ref_log_probs else None,
        args=args,
        train_dataset=Dataset.from_list(pairs * 2),
        processing_class=tokenizer(),
    )
    return fit(trainer, trainer.model)


def grpo(deepspeed: dict[str, Any] | None = None, *, ulps: int = 0, **more: Any) -> Report:
    """GRPOTrainer: hooks are taken off, the model generates, hooks are put on, and it trains on what it wrote."""
    from datasets import Dataset
    from transformers import set_seed
    from trl import GRPOConfig, GRPOTrainer

    kept(ulps)
    own = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1, "bf16": False}
    args = GRPOConfig(**{**own, **common(deepspeed, **more)})
    set_seed(0)
    model = loaded()

    def many_letters(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=many_letters,
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [text[:9] for text in SENTENCES]}),
        processing_class=tokenizer(),
    )
    report = fit(trainer, trainer.model)
    report["rewards"] = [e["reward"] for e in trainer.state.log_history if "reward" in e]
    return report


def rows() -> Iterator[dict[str, list[int]]]:
    """The sentences as token ids, with labels."""
    encode = tokenizer()
    for text in SENTENCES * 2:
        ids = encode(text)["input_ids"][:24]
        yield {"input_ids": ids, "labels": list(ids)}
