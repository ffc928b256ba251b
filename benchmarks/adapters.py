"""LoRA on a frozen base of 32, 8 and 4 bits, plain and hybrid: memory of base and snapshot, seconds, held-out loss.

A small Llama is trained on the standard library's source first; adapters then learn this project's own documents. All
arms have the same base, adapters, batches and number of steps on the clock.

python -m benchmarks.adapters
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import RESULTS, write_result
from hybridtrainer.config import HybridTrainerConfig
from hybridtrainer.data.text import stdlib_documents
from hybridtrainer.memory.frozen import quantize_frozen
from hybridtrainer.trainer import HybridTrainer

DOCUMENTS = Path(__file__).parent.parent / "docs"
CONTEXT, BATCH = 64, 8


def pieces(text: bytes) -> Tensor:
    """The text as rows of bytes."""
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def batches(data: Tensor, steps: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [data[torch.randint(len(data), (BATCH,), generator=generator)] for _ in range(steps)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens, labels=tokens).loss
    return loss


def trained_base(steps: int) -> Any:
    config = LlamaConfig(
        hidden_size=128, intermediate_size=320, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    make: Any = LlamaForCausalLM
    model = make(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = HybridTrainer(model, optimizer, loss_of, HybridTrainerConfig(predict="off"), clip_norm=1.0)
    for batch in batches(pieces(b"\n".join(stdlib_documents()[:200])), steps, seed=0):
        trainer.step(batch)
    return model


def tune(base: Any, bits: int, hybrid: bool, steps: int, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model: Any = get_peft_model(copy.deepcopy(base), LoraConfig(r=8, target_modules=targets, task_type="CAUSAL_LM"))
    if bits < 32:
        quantize_frozen(model, bits=bits)  # type: ignore[arg-type]
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    data = pieces(b"\n".join(path.read_bytes() for path in sorted(DOCUMENTS.glob("*.md"))))
    learned, held_out = data[:-96], list(data[-96:].view(-1, BATCH, CONTEXT))
    config = HybridTrainerConfig() if hybrid else HybridTrainerConfig(predict="off")
    trainer = HybridTrainer(model, torch.optim.AdamW(adapters, lr=2e-3), loss_of, config, clip_norm=1.0)
    before = trainer.evaluate(held_out)
    started, fed = time.perf_counter(), iter(batches(learned, steps + 200, seed))
    while trainer.step_count < steps:
        trainer.step(next(fed))
    seconds = time.perf_counter() - started
    counted = trainer.statistics()
    return {
        "bits": bits,
        "hybrid": hybrid,
        "seed": seed,
        "base_bytes": sum(parameter.nbytes for parameter in model.parameters() if not parameter.requires_grad),
        "adapter_bytes": sum(parameter.nbytes for parameter in adapters),
        "snapshot_bytes": trainer._undo.nbytes(),
        "seconds": seconds,
        "real_steps": counted.real_steps,
        "loss_before": before,
        "loss": trainer.evaluate(held_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    base = trained_base(arguments.base_steps)
    runs = []
    for seed in range(arguments.seeds):
        for bits in (32, 8, 4):
            for hybrid in (False, True):
                runs.append(tune(base, bits, hybrid, arguments.steps, seed))
                print(
                    {name: round(value, 4) if isinstance(value, float) else value for name, value in runs[-1].items()}
                )
    print(f"written to {write_result('adapters', {'runs': runs}, arguments.out)}")


if __name__ == "__main__":
    main()
