"""Two ranks on CPUs: the same decisions, the same bits, the same end; see `tests/ranks_driver.py` for what they run."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks_driver import ALIKE, TIMEOUT_SECONDS, batches_of, build, few_steps, settings_of, train
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from hybridtrainer import ranks
from hybridtrainer.checkpoint import read_checkpoint
from hybridtrainer.errors import CorruptCheckpointError, ForeignCheckpointError
from hybridtrainer.records import Phase
from hybridtrainer.tree import pack

KINDS = ("ddp", "fsdp", "stream")
PHASES = ("warmup", "full", "predict", "correct")
FAST = [
    "plain_equals+as_one+failing_step+wrong_batches+memory_runs_out+spike_after_a_jump+uneven+refusals+auto",
    "run_ddp+run_fsdp+run_stream+converted+read_by_torch",
    "restart_ddp_reference+signal_to_one+loader_fails+save_by_need",
    "kill_ddp_predict",
    "restart_ddp_predict",
]
DEATHS = [(kind, phase) for kind in KINDS for phase in (*PHASES, "save")]
SLOW = [
    *(f"restart_{kind}_reference" for kind in KINDS),
    *(f"{what}_{kind}_{phase}" for kind, phase in DEATHS for what in ("kill", "restart")),
    *(f"rerun_{kind}" for kind in KINDS),
    "hang",
    "own_loop_resumes",
]


class Found:
    """What the ranks of each case have written down."""

    def __init__(self, folder: Path, cases: list[str]) -> None:
        self.folder = folder
        alone = build("plain", 0, settings_of("ddp"))
        batches = batches_of(alone)
        while alone.current_phase is not Phase.CORRECT:
            alone.step(next(batches))
        alone.save(folder / "plain-correct")
        command = [sys.executable, "-m", "tests.ranks_driver", str(folder), *cases]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
        assert done.returncode == 0, done.stderr

    def __call__(self, case: str) -> list[dict[str, Any]]:
        """Of both ranks; a rank that has not come to an end is a failure."""
        return [self.of(case, rank) for rank in range(2)]

    def of(self, case: str, rank: int) -> dict[str, Any]:
        path = self.folder / f"{case}-{rank}.json"
        assert path.exists(), f"rank {rank} of {case} has not come to an end"
        found: dict[str, Any] = json.loads(path.read_text())
        assert "trace" not in found, found["trace"]
        return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("ranks"), FAST)


@pytest.fixture(scope="module")
def found_slowly(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("deaths"), SLOW)


def test_with_one_process_nothing_is_shared_and_nothing_fails_otherwise():
    assert (ranks.count(), ranks.rank(), ranks.is_first()) == (1, 0, True)
    assert ranks.exchange("x", 3) == [3] and ranks.each("x", lambda: 4) == 4 and ranks.on_first("x", lambda: 5) == 5
    error = torch.OutOfMemoryError("as it was")
    with pytest.raises(torch.OutOfMemoryError, match="as it was"):
        ranks.together("x", lambda: (_ for _ in ()).throw(error))
    lost = RuntimeError("[gloo/pair.cc:1] Connection closed by peer")
    assert ranks.named(lost) is lost and ranks.was_told(lost)


def test_prediction_off_is_a_plain_ddp_loop_bit_for_bit(found):
    """Clipped, with and without accumulation, and with DDP averaging gradients itself."""
    assert found("plain_equals") == [{"1, True": True, "2, True": True, "2, False": True}] * 2


@pytest.mark.parametrize("name", ALIKE)
def test_two_ranks_learn_what_one_process_learns_from_the_whole_batch(found, name):
    """Up to rounding; but for the first step of a fused update, which clips by the norm of each part."""
    kind = name.split(",")[0]
    alone = few_steps("stream" if kind == "stream" else "plain", 0, **ALIKE[name])
    for of_rank in found("as_one"):
        assert of_rank[name]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert of_rank[name] == found.of("as_one", 0)[name]  # bit for bit across ranks
        for parameter, values in alone["weights"].items():
            torch.testing.assert_close(
                torch.tensor(of_rank[name]["weights"][parameter]), torch.tensor(values), rtol=2e-3, atol=2e-4
            )


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_equal_on_all_ranks_after_every_step_of_every_phase(found, kind):
    first, second = found(f"run_{kind}")  # each step was followed by `require_same_on_all_ranks`
    assert first["told"] == second["told"]
    assert {phase for _, phase, _, _ in first["told"]} == set(PHASES) and first["jumps_kept"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_resume_bit_for_bit_in_the_middle_of_a_jump(found, kind):
    assert [each["resumed"] for each in found(f"run_{kind}")] == [{"predict": True, "correct": True}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_resume_bit_for_bit_from_warmup_and_full(found_slowly, kind):
    assert [each["resumed"] for each in found_slowly(f"rerun_{kind}")] == [{"warmup": True, "full": True}] * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(found, kind, phase):
    alone = build("stream" if kind == "stream" else "plain", 0, settings_of(kind))
    checkpoint = read_checkpoint(found.folder / f"{kind}-{phase}")
    alone.load(checkpoint)
    saved = checkpoint.state()
    told = found.of(f"run_{kind}", 0)["told"]
    place = next(number for number, each in enumerate(told) if each[0] == checkpoint.step) + 1
    assert alone.step_count == checkpoint.step and alone.current_phase.value == phase
    for name, parameter in alone.model.named_parameters():
        assert torch.equal(parameter, saved["parameters"][name])
    later = train(alone, checkpoint.step + 3)
    if (kind, phase) == ("fsdp", "predict"):  # windows of shards are cut otherwise, and are recorded anew
        assert later[0][3] == "jump refused: 0 windows are recorded and 2 are needed"
        return
    # The same samples, but dropout draws other numbers for the second half of each batch.
    expected = [loss for _, _, loss, _ in told[place : place + len(later)]]
    assert [loss for _, _, loss, _ in later] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("way", ["ddp to fsdp", "fsdp to ddp", "plain to ddp", "plain to fsdp"])
def test_a_checkpoint_goes_on_in_another_way_with_the_same_weights_and_its_jump_can_be_undone(found, way):
    assert [each[way] for each in found("converted")] == [[True, True, True]] * 2


def test_windows_of_shards_have_the_inner_products_of_the_whole(found):
    copies, shards = (torch.tensor(found.of(f"run_{kind}", 0)["gram"]) for kind in ("ddp", "fsdp"))
    torch.testing.assert_close(shards, copies, rtol=0.02, atol=1e-4)


def test_shards_are_put_together_into_the_weights_that_the_copies_have(found):
    """Copies and shards train alike up to rounding, so the whole of one is close to the other."""
    copies, shards = (read_checkpoint(found.folder / f"{kind}-full").state() for kind in ("ddp", "fsdp"))
    assert {name: value.shape for name, value in shards["parameters"].items()} == {
        name: value.shape for name, value in copies["parameters"].items()
    }
    for tree in ("parameters",):
        for name, value in shards[tree].items():
            torch.testing.assert_close(value, copies[tree][name], rtol=1e-2, atol=2e-4)
    for index, values in shards["optimizer"]["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(value, copies["optimizer"]["state"][index][key], rtol=0.05, atol=1e-4)
    for average, other in zip(shards["readout"]["average"], copies["readout"]["average"], strict=True):
        torch.testing.assert_close(average, other, rtol=1e-2, atol=2e-4)


def by_torch(folder: Path, expected: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint as torch's distributed checkpoint reads them, in one process."""
    state = {name: torch.full_like(value, 7) for name, value in expected.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


@pytest.mark.parametrize("kind", ["fsdp", "ddp", "plain"])
def test_torchs_distributed_checkpoint_reads_weights_moments_and_averages_whole(found, kind):
    folder = found.folder / f"{kind}-correct"
    named = pack(read_checkpoint(folder).state())[0]
    theirs = ("parameters/", "optimizer/", "buffers/", "readout/", "undo/parameters/", "undo/optimizer/")
    expected = {name: value for name, value in named.items() if name.startswith(theirs)}
    assert {name.split("/")[-1] for name in expected} >= {"exp_avg", "exp_avg_sq", "step"}
    assert any(name.startswith("readout/") for name in expected)
    state = by_torch(folder, expected)
    assert [name for name, value in expected.items() if not torch.equal(state[name], value)] == []


def test_torchs_distributed_checkpoint_fills_the_shards_of_a_model_and_divides_anew(found):
    for of_rank in found("read_by_torch"):
        assert of_rank["model"] and of_rank["anew"] and all(of_rank["anew"])


def test_a_damaged_file_of_the_second_rank_makes_the_checkpoint_unusable(found, tmp_path):
    source = found.folder / "fsdp-full"
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        raw = bytearray(file.read_bytes())
        if file.name == "rank-0001.safetensors":
            raw[-1] ^= 1
        (copy / file.name).write_bytes(raw)
    with pytest.raises(CorruptCheckpointError, match=r"rank-0001\.safetensors does not match"):
        read_checkpoint(copy)


def test_a_checkpoint_of_other_settings_is_foreign_on_one_rank_too(found):
    alone = build("plain", 0, {**settings_of("ddp"), "history_windows": 3})
    before = alone.fingerprint()["all"]
    with pytest.raises(ForeignCheckpointError, match="history_windows"):
        alone.load(found.folder / "ddp-full")
    assert alone.fingerprint()["all"] == before


def test_an_error_on_one_rank_stops_all_and_is_undone_on_all(found):
    first, second = found("failing_step")
    assert second["error"] == ["ValueError", "no such token"]
    assert first["error"][0] == "RankError" and "Rank 1 has failed: ValueError: no such token." in first["error"][1]
    assert first["undone"] and second["undone"]
    assert second["hook"][0] == "HookError" and first["hook"][0] == "RankError" and "HookError" in first["hook"][1]
    assert first["hook undone"] and second["hook undone"]
    assert first["goes on"] == second["goes on"] == ["fine", ""]


def test_too_few_micro_batches_on_one_rank_are_told_to_all_at_once(found):
    first, second = found("wrong_batches")
    assert second["error"][0] == "DataError"
    assert (
        first["error"][0] == "RankError" and "Rank 1 has failed: DataError: step needs a list of 2" in first["error"][1]
    )
    for each in (first, second):
        assert each["undone"] and each["goes on"] == ["fine", ""]


def test_a_loss_that_is_not_finite_on_one_rank_is_applied_on_none(found):
    for each in found("failing_step"):
        assert each["withheld"] and each["not finite"][0] == "DivergenceError"


def test_where_memory_runs_out_on_one_rank_all_divide_alike_and_none_jumps(found):
    for each in found("memory_runs_out"):
        assert each["parts"] == 2 and each["losses"] == pytest.approx(each["expected"], rel=1e-5)
        assert each["probe"] == "jump refused: GPU memory ran out in the probe"
        for place in ("in the snapshot", "in the jump", "in a window"):
            assert f"GPU memory ran out {place}" in each[place]


def test_a_loss_that_explodes_on_one_rank_takes_all_back_to_before_the_jump(found):
    for each in found("spike_after_a_jump"):
        for kind in ("ddp", "fsdp"):
            assert each[kind]["reason"].startswith("rolled back") and each[kind]["position"]
            assert each[kind]["equal"] == ["parameters", "optimizer", "buffers", "random", "readout", "scheduler"]


def test_auto_leaves_out_what_needs_one_process_and_all_ranks_read_out_alike(found):
    first, second = found("auto")
    assert first == second and all(each[1:] == [None, False] for each in first.values())


def test_unused_parameters_and_buffers_do_not_make_ranks_differ(found):
    assert found("uneven") == [{"moved": True}] * 2


@pytest.mark.parametrize(
    ("what", "kind", "said"),
    [
        ("plain", "ModelError", "DistributedDataParallel"),
        ("settings", "RankError", "their settings"),
        ("samples", "ModelError", "samples"),
        ("depth", "ModelError", "depth"),
        ("probes", "RankError", "number of probe batches"),
        ("memory", "ModelError", "memory.checkpoint_every"),
        ("scaler", "ModelError", "loss scaler"),
        ("batch", "DataError", "divided among 2 ranks"),
        ("weights", "RankError", "their first weights"),
        ("clipping", "RankError", "clip_norm"),
        ("rates", "RankError", "their optimizer"),
        ("schedules", "RankError", "their scheduler"),
        ("checkpoints", "RankError", "the checkpoint to load"),
        ("forecaster", "RankError", "the forecast"),
    ],
)
def test_what_cannot_work_is_refused_on_every_rank(found, what, kind, said):
    for each in found("refusals"):
        assert each[what][0] == kind and said in each[what][1]


def test_a_checkpoint_that_one_rank_does_not_see_is_loaded_by_none(found):
    first, second = (each["a checkpoint on one rank"] for each in found("refusals"))
    assert first[0] == "RankError" and "Rank 1 has failed" in first[1] and second[0] == "CorruptCheckpointError"


def test_a_signal_to_one_rank_ends_all_at_the_same_step_and_resume_is_exact(found):
    first, second = found("signal_to_one")
    assert first["status"] == second["status"] == ["interrupted", "finished"] and first["step"] == second["step"]
    for rank, each in enumerate((first, second)):
        assert each["digest"] == found.of("restart_ddp_reference", rank)["digest"]


def test_data_that_fail_on_one_rank_leave_a_checkpoint_of_the_last_step(found):
    first, second = found("loader_fails")
    assert second["error"] == ["OSError", "the disk has gone"] and first["error"][0] == "RankError"
    assert first["step"] == 9 and first["saved"] == ["000001-step-9"]


def test_where_memory_is_short_on_one_rank_all_save_at_the_next_step(found):
    assert found("save_by_need") == [{"saved": ["000001-step-4"]}] * 2


def check_death(found: Found, kind: str, phase: str) -> None:
    """The other rank has ended (or there is no file of it), with a clear error; the restarted run is the same."""
    name, text = found.of(f"kill_{kind}_{phase}", 0)["error"]
    assert name == "RankError" and "Rank 0 of 2 cannot reach the others" in text
    assert not (found.folder / f"kill_{kind}_{phase}-1.json").exists()
    for rank, each in enumerate(found(f"restart_{kind}_{phase}")):
        assert each["status"] == "finished"
        assert each["digest"] == found.of(f"restart_{kind}_reference", rank)["digest"]
    assert found.of(f"restart_{kind}_{phase}", 0)["left behind"] == []


def test_when_one_rank_is_killed_in_a_probe_the_other_says_so_and_a_restart_is_exact(found):
    check_death(found, "ddp", "predict")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "phase"), DEATHS)
def test_one_rank_killed_in_each_phase_ends_the_other_and_a_restart_is_exact(found_slowly, kind, phase):
    check_death(found_slowly, kind, phase)


@pytest.mark.slow
def test_a_loop_of_ones_own_on_two_ranks_keeps_one_folder_and_resumes_exactly(found_slowly):
    names = ["checkpoints", "config.toml", "environment.json", "lock", "log.jsonl", "statistics.json"]
    for each in found_slowly("own_loop_resumes"):
        assert each["same"] and each["clock"] >= 44 and each["files"] == names


@pytest.mark.slow
def test_a_rank_that_hangs_is_given_up_after_the_time_out(found_slowly):
    name, text = found_slowly.of("hang", 0)["error"]
    assert name == "RankError" and f"{TIMEOUT_SECONDS * 1000:.0f}ms" in text
