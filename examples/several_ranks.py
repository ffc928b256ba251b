"""A GPT on Python's own source, trained by several processes: `torchrun --nproc-per-node 2 examples/several_ranks.py`.

Every rank has a copy of the model; with `--shard` each has a part of every weight. It runs on CPUs, or with one GPU a
rank. Every rank runs the same program: what it must do alone, such as printing, it asks about its rank.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hybridtrainer import HybridTrainer, HybridTrainerConfig
from hybridtrainer.data.text import ByteTokenizer, load_text, stdlib_documents
from hybridtrainer.models.gpt import GPT, GPTConfig, gpt_loss

on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
rank, device = dist.get_rank(), "cuda" if on_gpu else "cpu"

torch.manual_seed(0)  # the same weights on every rank
text = load_text(stdlib_documents()[:100], ByteTokenizer(), 64, 0.05, 0.05, "Python's own source")
gpt = GPT(GPTConfig("gpt2", 2, 64, 4, vocabulary=text.vocabulary, context=64)).to(device)
model: nn.Module = gpt
if "--shard" in sys.argv:
    for block in gpt.blocks:
        fully_shard(block)
    fully_shard(model)
else:
    model = DistributedDataParallel(gpt)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after the model is wrapped or sharded
torch.manual_seed(rank)  # other dropout on every rank

probes = [text.probe.batch_of(range(start, start + 16)).to(device) for start in (0, 16)]
config = HybridTrainerConfig(predict=["jumps"], warmup_steps=20, full_steps=10)
trainer = HybridTrainer(model, optimizer, gpt_loss, config, clip_norm=1.0, probe_batches=probes)
loader = trainer.loader(text.train, batch_size=16)  # of all ranks together; each gets its part
while trainer.step_count < 120:
    for batch in loader:
        result = trainer.step(batch.to(device))
        if rank == 0 and result.step % 20 == 0:
            print(f"step {result.step}: loss {result.loss:.4f}, {result.phase.value}")
        if trainer.step_count >= 120:
            break
evaluation = trainer.evaluate(probes)  # every rank calls it, and gets the mean over all
if rank == 0:
    print(f"probe loss {evaluation:.4f}, {trainer.statistics().jumps_kept} jumps kept")
dist.barrier()  # a rank that leaves while another still talks to it may take it along
dist.destroy_process_group()
