"""Fine-tunes a LoRA adapter on your own text file, on a frozen base of 16, 8 or 4 bits.

    python examples/finetune_lora.py my_text.txt --model path/to/a/hugging-face-folder --bits 4

Nothing is downloaded. Without `--model` a small GPT-2 is trained on Python's own source first, in about half a minute,
and serves as the base.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    TrainingArguments,
)

from hybridtrainer import HybridTrainerConfig
from hybridtrainer.data.text import stdlib_documents
from hybridtrainer.integrations.huggingface import Trainer
from hybridtrainer.memory.frozen import quantize_frozen

BASE_STEPS = 120  # enough to have learned something to build on, and far too few to write sentences
LEAST_CHARACTERS = 3000


def make_base(folder: Path, steps: int) -> None:
    """A small GPT-2 with its tokenizer, trained for a moment on Python's source."""
    text = b"\n".join(stdlib_documents()[:100]).decode(errors="replace")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([text], vocab_size=1024, special_tokens=["<end>"], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, eos_token="<end>")
    config = GPT2Config(
        vocab_size=1024, n_positions=128, n_embd=64, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    fit(model, blocks(tokenizer, text, 128)[:2000], folder, steps, learning_rate=3e-3)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def blocks(tokenizer: Any, text: str, length: int) -> list[dict[str, torch.Tensor]]:
    """The text as pieces of so many tokens."""
    tokens = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    whole = tokens[: len(tokens) // length * length].view(-1, length)
    return [{"input_ids": piece, "labels": piece} for piece in whole]


def fit(model: Any, data: Any, folder: Path, steps: int, held_out: Any = None, **changes: Any) -> Any:
    """Trains, and returns the trainer."""
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=steps,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=max(1, steps // 5),
        report_to="none",
        disable_tqdm=True,
        **changes,
    )
    settings = HybridTrainerConfig(warmup_steps=max(10, steps // 4))
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=held_out, hybrid=settings)
    if held_out is not None:
        print(f"held-out loss before: {trainer.evaluate()['eval_loss']:.4f}")
    trainer.train()
    return trainer


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path, help="a text file to learn from")
    parser.add_argument("--model", type=Path, help="a folder with a causal language model and its tokenizer")
    parser.add_argument("--out", type=Path, default=Path("adapter"), help="where the adapter goes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate; large models want less, such as 2e-4")
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16, help="of the frozen base; 16 is as it is")
    parser.add_argument("--force", action="store_true", help="replace an adapter that is there")
    chosen = parser.parse_args(argv)
    try:
        text = chosen.text.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        parser.error(f"{chosen.text} cannot be read: {error.strerror}")
    if (chosen.out / "adapter_config.json").exists() and not chosen.force:
        parser.error(f"{chosen.out} has an adapter already; name another folder with --out, or give --force")
    if len(text) < LEAST_CHARACTERS:
        parser.error(f"{chosen.text} has {len(text)} characters; some thousands are needed")
    if chosen.model is None:
        chosen.model = chosen.out / "base"
        if (chosen.model / "config.json").exists():
            print(f"using the base in {chosen.model}")
        else:
            make_base(chosen.model, BASE_STEPS)
    elif not chosen.model.is_dir():
        parser.error(f"{chosen.model} is no folder; nothing is downloaded")
    chosen.model = chosen.model.resolve()  # the adapter says where its base is, wherever it is loaded from
    tokenizer = AutoTokenizer.from_pretrained(chosen.model, local_files_only=True)
    base = AutoModelForCausalLM.from_pretrained(chosen.model, local_files_only=True)
    pieces = blocks(tokenizer, text, 128)
    if len(pieces) < 10:
        parser.error(f"{chosen.text} has {len(pieces)} pieces of 128 tokens; at least 10 are needed")
    held_out = max(1, len(pieces) // 10)

    model = get_peft_model(base, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    if chosen.bits < 16:
        print(f"the frozen base takes {quantize_frozen(model, bits=chosen.bits) / 1e6:.1f} MB less")
    trainer = fit(model, pieces[:-held_out], chosen.out, chosen.steps, pieces[-held_out:], learning_rate=chosen.lr)
    print(f"held-out loss after: {trainer.evaluate()['eval_loss']:.4f}")
    counted = trainer.hybrid.statistics()
    print(f"{counted.real_steps} real steps, {counted.foreseen_steps} foreseen; adapter in {chosen.out}")
    trainer.save_model(str(chosen.out))
    tokenizer.save_pretrained(chosen.out)


if __name__ == "__main__":
    main()
