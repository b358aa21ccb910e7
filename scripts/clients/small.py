"""What the scripts of TRL, PEFT and LLaMA-Factory share: sentences, a tokenizer and a small random model, all local."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

SPECIAL = ("<pad>", "<s>", "</s>")


def paragraphs(count: int, characters: int = 400) -> list[str]:
    """Pieces of the Python standard library's sources, always the same."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sorted(folder.glob("*.py")))
    pieces = (text[start : start + characters] for text in texts for start in range(0, len(text), characters))
    return [piece for piece, _ in zip(pieces, range(count), strict=False)]


def byte_tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate((*SPECIAL, *letters))}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    pad, first, last = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=pad, bos_token=first, eos_token=last)


def write_model(folder: Path, width: int = 128, layers: int = 4) -> None:
    """A random Llama and its tokenizer, as a downloaded one would lie there."""
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def zero3(folder: Path, **more: Any) -> dict[str, Any]:
    """Stage 3 with weights and states on NVMe, everything else "auto"."""
    folder.mkdir(parents=True, exist_ok=True)
    place = {"device": "nvme", "nvme_path": str(folder)}
    return {
        "zero_optimization": {
            "stage": 3,
            "offload_param": place,
            "offload_optimizer": place,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        **more,
    }
