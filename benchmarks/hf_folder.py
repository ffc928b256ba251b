"""A folder of Hugging Face, streamed and written back: how much host memory that takes beside the streamed model.

Loading is compared with `from_pretrained` and `stream`, on a Llama of random weights in bf16. What counts is anonymous
memory, sampled from /proc while a call runs; on a CPU embedding and head, which stay on the device, are in it.

python -m benchmarks.hf_folder --width 1024 --layers 16
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.record import RESULTS, write_result
from benchmarks.stream_checkpoint import watched
from hybridtrainer.config_memory import MemoryConfig
from hybridtrainer.integrations.huggingface_streamed import save_pretrained, stream_pretrained
from hybridtrainer.memory.optimizer import StreamedOptimizer
from hybridtrainer.memory.stream import stream


def make_folder(folder: Path, width: int, layers: int) -> int:
    """Writes the folder; returns the number of parameters."""
    config = LlamaConfig(
        hidden_size=width, intermediate_size=8 * width // 3 // 64 * 64, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=32000, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    make: Any = LlamaForCausalLM
    model = make(config).bfloat16()
    model.save_pretrained(folder, max_shard_size="200MB")
    return sum(parameter.numel() for parameter in model.parameters())


def ours(folder: Path, memory: MemoryConfig, device: str) -> Any:
    return stream_pretrained(folder, memory, device)


def by_hand(folder: Path, memory: MemoryConfig, device: str) -> Any:
    return stream(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), memory, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--mode", default="split8")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    memory = MemoryConfig.model_validate({"mode": arguments.mode})
    content: dict[str, Any] = {"mode": arguments.mode}
    with tempfile.TemporaryDirectory() as temporary:
        folder, target = Path(temporary) / "from", Path(temporary) / "to"
        content["parameters"] = make_folder(folder, arguments.width, arguments.layers)
        content["folder_bytes"] = sum(file.stat().st_size for file in folder.iterdir())
        held: list[Any] = []
        for name, load in (("by_hand", by_hand), ("ours", ours)):
            held.clear()
            gc.collect()
            measured = watched(lambda load=load: held.append(load(folder, memory, arguments.device)))  # type: ignore[misc]
            optimizer = held[0].optimizer
            assert isinstance(optimizer, StreamedOptimizer)
            content["host_bytes"] = optimizer.host_bytes
            content[f"loading_{name}"] = measured | {"beside_bytes": measured["extra_bytes"] - optimizer.host_bytes}
        content["saving_ours"] = watched(lambda: save_pretrained(held[0], target))
        original, written = (
            AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16) for each in (folder, target)
        )
        pairs = zip(original.parameters(), written.parameters(), strict=True)
        content["round_trip_equal"] = all(torch.equal(one, other) for one, other in pairs)
    for name, value in content.items():
        print(f"{name:18} {value}")
    print(f"written to {write_result('hf_folder', content, arguments.out)}")


if __name__ == "__main__":
    main()
