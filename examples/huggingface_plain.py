"""Training with Hugging Face's Trainer. `huggingface_hybrid.py` is the same with two lines changed."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
source = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
windows = [{"input_ids": tokens, "labels": tokens} for tokens in source[: len(source) // 64 * 64].view(-1, 64)]
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2))

with TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=200,
        per_device_train_batch_size=16,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        logging_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=windows[:-40], eval_dataset=windows[-40:])
    trainer.train()
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.4f}")
