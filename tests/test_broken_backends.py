"""The suite has tests of its own: broken twins of the real backends, which it must fail."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken.xmem_broken import LIES
from distributions import make_distribution

HERE = Path(__file__).parent

# What must fail for each lie; other tests may fail too.
CAUGHT_BY = {
    "noop_checkpoint": [
        "test_each_block_runs_once_more_in_backward",
        "test_checkpointed_blocks_run_exactly_twice",
        "test_checkpointing_lowers_the_peak",
        "test_every_block_of_every_segment_runs_once_more",
        "test_segments_take_what_they_should",
    ],
    "twice_checkpoint": [
        "test_each_block_runs_once_more_in_backward",
        "test_checkpointed_blocks_run_exactly_twice",
    ],
    "detaching_checkpoint": [
        "test_loss_and_gradients_are_the_same",
        "test_its_gradients_are_the_baselines",
    ],
    "last_plain_checkpoint": ["test_every_block_of_every_segment_runs_once_more"],
    "raw_checkpoint": [
        "test_running_statistics_are_those_of_plain_training",
        "test_randomness_of_the_host_is_replayed",
        "test_a_recomputation_of_another_shape_is_named",
    ],
    "redrawing_checkpoint": ["test_randomness_of_the_host_is_replayed"],
    "unchecked_checkpoint": ["test_other_values_are_found_where_they_are_asked_for"],
    "leaky_checkpoint": ["test_a_hundred_steps_leave_the_allocated_bytes_where_they_were"],
    "constant_meter": [
        "test_a_tensor_adds_its_bytes_and_takes_them_away",
        "test_checkpointing_lowers_the_peak",
    ],
    "forgetful_meter": ["test_the_peak_stays_until_it_is_reset"],
    "wrong_gradients": ["test_gradients_agree_with_finite_differences"],
    "noop_autocast": [
        "test_autocast_lowers_what_is_kept",
        "test_half_precision_is_reported_and_close_and_gone_after_the_block",
        "test_its_receipt_says_what_it_saves",
    ],
    "stepping_scaler": ["test_an_overflow_changes_no_parameter_no_state_and_no_count"],
    "stuck_scaler": ["test_the_scale_follows_the_overflows"],
    "masterless_cast": ["test_a_cast_model_with_masters_learns_what_float32_learns"],
    "unclipped_gradients": ["test_gradients_are_clipped_to_their_norm"],
    "keeping_no_grad": ["test_without_gradients_outputs_hold_nothing_but_themselves"],
    "holding_log": ["test_logged_values_hold_nothing"],
    "forgetful_backward": [
        "test_micro_batches_have_the_gradients_of_one_large_batch",
        "test_an_accumulation_steps_once",
    ],
    "noop_plan": ["test_any_schedule_is_played_as_it_is_written"],
    "twice_plan": ["test_any_schedule_is_played_as_it_is_written"],
    "detaching_plan": ["test_any_schedule_is_played_as_it_is_written"],
    "holding_plan": ["test_a_plan_keeps_to_its_budget_and_to_what_it_predicts"],
    "constant_marks": ["test_a_plan_keeps_to_its_budget_and_to_what_it_predicts"],
    "unpacked_plan": ["test_packed_stages_keep_what_was_predicted_and_round"],
    "noop_compression": [
        "test_fewer_bits_take_fewer_bytes",
        "test_losses_are_the_same_and_gradients_close",
        "test_compression_lowers_the_peak_and_rounds",
    ],
    "stuck_compression": ["test_the_rounding_is_unbiased"],
    "coarse_compression": [
        "test_losses_are_the_same_and_gradients_close",
        "test_its_gradients_are_the_baselines",
    ],
    "noop_offload": [
        "test_losses_and_gradients_do_not_change_when_activations_leave",
        "test_activations_that_leave_lower_the_peak",
        "test_the_receipt_says_what_left_and_nothing_is_silent",
        "test_a_disk_that_is_full_raises_within_the_step_and_training_goes_on",
        "test_offload_lowers_the_peak",
    ],
    "stale_offload": [
        "test_losses_and_gradients_do_not_change_when_activations_leave",
        "test_its_gradients_are_the_baselines",
    ],
    "other_step": ["test_an_optimizer_whose_states_are_away_steps_as_without"],
    "resident_states": [
        "test_an_optimizer_whose_states_are_away_steps_as_without",
        "test_states_that_are_away_take_no_memory_of_the_device",
    ],
    "resident_parameters": ["test_a_model_whose_parameters_are_away_computes_the_same"],
    "noop_optimizers": [
        "test_states_take_the_bytes_that_are_said",
        "test_a_running_optimizer_goes_on_in_fewer_bytes",
    ],
    "noop_weights": [
        "test_what_was_saved_is_freed",
        "test_what_is_put_back_is_what_was_computed_with",
    ],
    "noop_trim": ["test_trimming_gives_back_exactly_what_it_says"],
    "loose_limit": ["test_a_limit_holds_and_can_be_taken_away"],
    "noop_preallocation": ["test_preallocated_memory_is_used"],
    "flat_history": ["test_the_peak_and_the_history_start_again"],
    "phaseless_pool": ["test_gradients_of_a_step_that_failed_are_not_added_to_the_next"],
    "nameless_pool": ["test_the_diagnosis_adds_up_and_names_what_the_model_owns"],
    "blind_pool": ["test_a_kept_loss_is_found_and_named"],
    "lonely_all_reduce": ["test_all_reduce_is_right_for_every_type_and_operation"],
    "silent_data_parallel": [
        "test_gradients_are_averaged_exactly_once",
        "test_ten_steps_are_those_of_one_process",
    ],
    "whole_optimizer": ["test_zero1_keeps_a_share_of_the_optimizers_states"],
    "forgetful_states": ["test_what_one_process_saved_goes_on_sharded"],
}
# Programs on several ranks take a while; two ranks show these lies.
ON_RANKS = ("lonely_all_reduce", "silent_data_parallel", "whole_optimizer", "forgetful_states")


def run_suite(backend, folder, *options):
    """Run the suite on a backend; returns the exit code and the names of failed tests."""
    path = os.pathsep.join([str(folder), str(HERE / "broken"), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--pyargs", "xmem.conformance"),
            *("-p", "xmem.conformance.plugin", "-p", "no:cacheprovider", "-q", "--tb=line", "-rf"),
            *("--backend", backend, "--workload", "mlp", *options),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    failed = {f.split("[")[0] for f in re.findall(r"^FAILED \S+::(\S+)", ran.stdout, re.M)}
    return ran.returncode, failed, ran.stdout + ran.stderr


def test_every_lie_is_expected_to_be_caught():
    assert CAUGHT_BY.keys() == LIES.keys()


@pytest.mark.parametrize(
    ("base", "lie"),
    [
        *[pytest.param("torch", lie, marks=pytest.mark.torch) for lie in LIES],
        *[
            pytest.param("jittor", lie, marks=pytest.mark.jittor)
            for lie in (
                "noop_checkpoint",
                "redrawing_checkpoint",
                "constant_meter",
                "wrong_gradients",
                "noop_autocast",
                "stepping_scaler",
                "keeping_no_grad",
                "forgetful_backward",
                "noop_plan",
                "twice_plan",
                "noop_compression",
                "stuck_compression",
                "noop_offload",
                "resident_states",
                "noop_trim",
                "silent_data_parallel",
            )
        ],
    ],
)
def test_the_suite_fails_a_broken_backend(base, lie, tmp_path):
    if importlib.util.find_spec(base) is None:
        pytest.skip(f"{base} is not installed")
    name = f"broken-{lie}-{base}"
    make_distribution(tmp_path, "xmem-broken", {name: f"xmem_broken:{lie}__{base}"})
    chosen = " or ".join(CAUGHT_BY[lie])
    if lie in ON_RANKS:
        chosen = f"({chosen}) and 2-ranks"
    code, failed, output = run_suite(name, tmp_path, "-k", chosen)
    assert code == 1, output
    assert set(CAUGHT_BY[lie]) <= failed, output
