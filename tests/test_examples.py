"""The examples run, learn, and differ from their plain halves in as many lines as they say."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"
NEEDS = {"accelerate": "accelerate", "huggingface": "accelerate", "lightning": "lightning"}
CHANGED = {
    "accelerate": [
        "from hybridtrainer.integrations.accelerate import from_accelerate",
        "trainer = from_accelerate(accelerator, model, optimizer, loss_fn, clip_norm=1.0)",
        "result = trainer.step(batch)",
    ],
    "huggingface": [
        "from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments",
        "from hybridtrainer.integrations.huggingface import Trainer",
    ],
    "lightning": [
        "from hybridtrainer.integrations.lightning import HybridStrategy",
        "strategy = HybridStrategy()",
        "strategy=strategy,",
    ],
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_hybrid_example_differs_from_the_plain_one_in_what_it_says(name):
    plain = (EXAMPLES / f"{name}_plain.py").read_text().splitlines()
    hybrid = (EXAMPLES / f"{name}_hybrid.py").read_text().splitlines()
    new = [line.strip() for line in hybrid[1:] if line.strip() and line not in plain and "print" not in line]
    assert new == CHANGED[name]
    words = {2: "two", 3: "three"}[len(new)]
    assert all(f"{words} lines changed" in text[0] for text in (plain, hybrid))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lightning", "hybrid"),
        *(pytest.param(name, "hybrid", marks=pytest.mark.slow) for name in ("accelerate", "huggingface")),
        *(pytest.param(name, "plain", marks=pytest.mark.slow) for name in CHANGED),
    ],
)
def test_each_example_learns(name, kind, capsys):
    pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(EXAMPLES / f"{name}_{kind}.py"))
    out = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^(?:epoch.*|held-out )loss ([\d.]+)", out, flags=re.M)]
    assert losses[-1] < 2.8  # 5.5 in the beginning
    if kind == "hybrid":
        assert any(int(share) >= 2 for share in re.findall(r"(\d+)% fewer backward passes", out))


@pytest.mark.slow
def test_an_adapter_is_tuned_on_a_text_file_of_the_users_own(tmp_path, capsys):
    pytest.importorskip("peft", reason="peft is not installed")
    text = tmp_path / "mine.txt"
    text.write_text("\n".join(f"{number} times {number} is {number * number}." for number in range(3000)))
    script: dict[str, Any] = runpy.run_path(str(EXAMPLES / "finetune_lora.py"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script["main"]([str(text), "--out", str(tmp_path / "out"), "--steps", "30", "--bits", "4", "--lr", "1e-2"])
    out = capsys.readouterr().out
    before, after = (float(re.search(rf"held-out loss {when}: ([\d.]+)", out)[1]) for when in ("before", "after"))  # type: ignore[index]
    assert after < before - 0.2
    assert "MB less" in out

    import peft
    import transformers

    tuned = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")  # finds its base from anywhere
    assert any(bool(one.any()) for name, one in tuned.named_parameters() if "lora_B" in name)
    tokens = torch.tensor([transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("7 times 7 is")["input_ids"]])
    assert tuned.generate(input_ids=tokens, max_new_tokens=4, do_sample=False).shape[1] == tokens.shape[1] + 4
    for content, options, words in (
        ("x" * 5000, [], "has an adapter already"),
        ("too short", ["--force"], "characters; some thousands are needed"),
        ("import " * 440, ["--force"], "at least 10 are needed"),
    ):
        text.write_text(content)
        with pytest.raises(SystemExit):
            script["main"]([str(text), "--out", str(tmp_path / "out"), *options])
        assert words in capsys.readouterr().err
