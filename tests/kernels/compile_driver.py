"""Compiles every pass for a GPU that need not be there, and prints the names of those that came out.

Triton is imported when this runs, not when pytest looks for tests here: it would not be the interpreter then.
"""

from __future__ import annotations

from typing import Any

import torch

from hybridtrainer.kernels.formats import CODES, Format, state_fields, weight_dtype
from hybridtrainer.kernels.rounding import SMALLEST_SCALE

POINTERS = {"torch.int8": "*i8", "torch.uint8": "*u8", "torch.int16": "*i16", "torch.float32": "*fp32"}
WIDE_INTEGERS = {"elements", "entries", "first_element", "height", "width"}


def compiles(kernel: Any, types: dict[str, str], constants: dict[str, Any]) -> bool:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_for

    signature = {}
    for name in kernel.arg_names:
        otherwise = "i32" if "key" in name or name == "tiles" else "i64" if name in WIDE_INTEGERS else "fp32"
        signature[name] = "constexpr" if name in constants else types.get(name, otherwise)
    positions = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=positions)
    built = compile_for(source, target=GPUTarget("cuda", 90, 32))
    return "cubin" in built.asm


def adam_pass_compiles(kind: Format) -> bool:
    from hybridtrainer.kernels import passes

    fields = {name: POINTERS[str(dtype)] for name, (dtype, _) in state_fields(kind, (64, 64)).items()}
    weight = "*fp32" if weight_dtype(kind) == torch.float32 else "*bf16"
    types = {"weight": weight, "gradient": "*bf16", "scale": "*fp32", "ok": "*i32"} | fields
    absent = {name: None for name in ("low", "m_scale", "v_scale") if name not in fields}
    codes = CODES.get(kind)
    sizes = {"BITS": 32, "TOP1": 0, "TOP2": 0, "BLOCK": 256, "BLOCKS": 4}
    if codes:
        tops = {"TOP1": codes.first_top, "TOP2": codes.second_top}
        sizes = tops | {"BITS": codes.bits, "BLOCK": codes.block, "BLOCKS": 1024 // codes.block}
    return compiles(passes.adam_pass, types, absent | sizes | {"LOW": "low" in fields, "SMALLEST": SMALLEST_SCALE})


def dynamics_passes_compile() -> list[str]:
    from hybridtrainer.kernels import feature_reference, features, rollout

    told = {"LENGTH": feature_reference.LENGTH, "WIDTH": len(feature_reference.COLUMNS), "TINY": feature_reference.TINY}
    told |= {"LEAST": feature_reference.LEAST_SPREAD, "LIMIT": feature_reference.LIMIT, "CHUNK": features.CHUNK}
    types = {"rows": "*fp32", "out": "*fp32", "newest": "i32", "known": "i32", "ticks": "i32"}
    weights = ("states", "h", "z", "w_input", "b_input", "w_hidden", "b_hidden", "w_prior", "b_prior")
    types |= dict.fromkeys(weights, "*fp32") | {"met": "*i32"}
    sizes = {"D": 256, "Z": 256, "CLASSES": 8, "UNIFORM": rollout.UNIFORM}
    shared = sizes | {"PARTS": 16, "TILE": 256}
    alone = sizes | {"PARTS": 1, "TILE": rollout.TILE // 256}
    each = ((features.feature_pass, told), (rollout.rollout_pass, shared), (rollout.rollout_pass, alone))
    return [kernel.__name__ for kernel, constants in each if compiles(kernel, types, constants)]


def packing_passes_compile() -> list[str]:
    from hybridtrainer.kernels import packed, packed_passes

    types = {"words": "*i32", "marks": "*i16", "codes": "*i16", "heads": "*u8", "rest": "*i16", "whole": "*u8"}
    types |= {"most": "*i32", "groups": "i64"}
    few = {"HALF": packed.GROUP // 4, "ROWS": packed.ROWS, "OF_ZERO": packed.OF_ZERO}
    sizes = few | {"ESCAPES": packed.ESCAPES}
    each = ((packed_passes.pack_pass, sizes), (packed_passes.unpack_pass, sizes), (packed_passes.count_pass, few))
    return [kernel.__name__ for kernel, constants in each if compiles(kernel, types, constants)]


if __name__ == "__main__":
    from hybridtrainer.kernels import passes

    coded: tuple[Format, ...] = ("split32", "split8", "sr8", "sr4", "sr32", "full8", "full4")
    print(*(kind for kind in coded if adam_pass_compiles(kind)))
    pointers = dict.fromkeys(("scale", "rows", "columns", "sums", "row_sums", "column_sums", "rate"), "*fp32")
    pointers |= {"weight": "*bf16", "gradient": "*bf16", "ok": "*i32"}
    for kernel in (passes.square_sums_pass, passes.factored_square_pass, passes.factored_pass):
        if compiles(kernel, pointers, {"ROWS": 2, "COLUMNS": 512}):
            print(kernel.__name__)
    print(*dynamics_passes_compile())
    print(*packing_passes_compile())
