"""Tests that `make test` leaves to `make test-all`, beside those marked ``slow`` where they are written.

A test is here because another test, which stays in the daily run, covers the same mechanism. Names are matched without
folders, so that a file can move. An entry that matches nothing fails ``tests/test_lanes.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.runtime.classes_without_plans import CLASSES, DAILY

__all__ = ["NIGHTLY", "Family", "is_nightly"]


@dataclass(frozen=True)
class Family:
    """Cases of one test function.

    Attributes:
        file: pattern of the file's name.
        test: name of the function.
        cases: what stands in brackets behind it, one string for each case; empty: the whole function.
        daily: what covers the mechanism in the daily run.
    """

    file: str
    test: str
    cases: tuple[str, ...]
    daily: str


_ONE_STEP = "every plan has one mesh shape daily: four ranks (dp x tp, tp), or two where four take ten seconds"
_SIMULATED = "test_big_meshes and test_ops_simulated run on 64 simulated ranks"

NIGHTLY = [
    Family(
        "test_proposals.py",
        "test_drawn_proposals_equal_one_device",
        tuple(
            f"{name}-{n}" for name in ("llama", "gpt2", "mixtral", "vit", "net") for n in range(6) if n or name != "net"
        ),
        "three drawn proposals for a network that no plan was written for; the plans of the zoo train in test_training.py",
    ),
    Family("test_proposals.py", "test_drawn_stages_equal_one_device", ("1", "2", "3"), "one drawn pipeline"),
    Family("test_proposals.py", "test_other_axes", ("context",), "ranks of experts"),
    Family(
        "test_search.py",
        "test_closed_form_is_the_estimate",
        tuple(f"{kind}-{n}" for kind in ("Llama", "Mixtral") for n in range(4) if n or kind != "Llama"),
        "two drawn choices of a Llama",
    ),
    Family("test_search.py", "test_closed_form_of_stages_is_the_estimate", (), "pipelines of a search by their blocks"),
    Family("test_search.py", "test_more_memory_is_never_worse", (), "small and large memory, one each"),
    Family(
        "test_measured.py",
        "test_bytes_of_a_step",
        (
            ("dp", "tp", "zero3 uneven", "tp full", "zero3 full", "tp selective", "zero3 selective", "zero3 offload")
            + ("experts dp", "experts tp", "experts full", "stages selective")
        )
        + ("stages",),
        "ZeRO-3 on two ranks; stages of equal layers against real ranks in test_estimate.py",
    ),
    Family("test_estimate.py", "test_equal_modules_run_once", ("llama",), "the same with ZeRO-3"),
    Family(
        "test_estimate.py",
        "test_stages_of_a_pipeline",
        ("1F1B", "GPipe"),
        "interleaved stages; 1F1B of equal layers that run once, against real ranks",
    ),
    Family("test_estimate.py", "test_halves_of_backwards_take_their_time", (), "bubbles of whole backwards"),
    Family(
        "test_composition.py",
        "test_units_in_stages",
        ("1F1B of ZeRO-1", "1F1B of ZeRO-3", "ZBV"),
        "1F1B by step, ZBV by micro-batch",
    ),
    Family(
        "test_composition.py",
        "test_counts_are_those_of_the_ledger",
        ("1F1B", "ZBV", "1F1B of ZeRO-1"),
        "two stages on a rank, by micro-batch; ZeRO-3; without units",
    ),
    Family("test_composition.py", "test_no_sync", ("1F1B",), "tied parameters without units; units by micro-batch"),
    Family(
        "test_composition.py",
        "test_precision_in_stages",
        ("blocks", "units", "policies"),
        "of the whole model; policies of units in test_precision.py",
    ),
    Family("test_composition.py", "test_experts", ("units",), "experts on their ranks; units with other models"),
    Family(
        "test_training.py",
        "test_step_equals_one_device",
        (
            ("sd3-4", "dit-4", "gpt_oss-2", "deepseek_v3-2", "t5-2", "mixtral-2", "whisper-2", "qwen3-2", "qwen3_moe-2")
            + ("vit-2",)
        )
        + ("gpt2-2", "llama-2", "llama_zero3-2"),
        _ONE_STEP,
    ),
    Family(
        "test_static_zoo.py",
        "test_same_bits_as_eager_mode",
        ("deepseek_v3", "dit", "gpt_oss", "qwen3", "qwen3_moe", "sd3", "whisper", "llama", "llama_zero3"),
        "gpt2, encoder-decoder (t5), vision and experts (mixtral); a Llama in test_record_zoo.py, units in test_units.py",
    ),
    Family(
        "test_dispatcher.py",
        "test_same_bits_as_pytorchs_path",
        ("deepseek_v3", "gpt_oss", "llama", "qwen3", "qwen3_moe", "sd3", "whisper", "dit", "gpt2", "t5", "vit"),
        "dense with ZeRO-3 (llama_zero3) and experts (mixtral); every op of the dispatcher in test_native_dispatch.py",
    ),
    Family(
        "test_training.py",
        "test_experts_that_meet_all_tokens",
        ("gpt_oss-4", "deepseek_v3-4", "mixtral-2", "qwen3_moe-2"),
        "each model once: gpt_oss and deepseek_v3 on two ranks, mixtral and qwen3_moe on four",
    ),
    Family(
        "test_training.py",
        "test_load_balancing_losses",
        (
            (
                "gpt_oss-2-False",
                "gpt_oss-2-True",
                "gpt_oss-4-False",
                "mixtral-2-False",
                "mixtral-4-True",
                "qwen3_moe-2-False",
            )
            + ("qwen3_moe-2-True",)
        )
        + ("mixtral-4-False", "qwen3_moe-4-True"),
        "gpt_oss and mixtral padded, qwen3_moe not",
    ),
    Family(
        "test_zero.py",
        "test_step_equals_one_device",
        ("sd3", "gpt_oss", "whisper", "deepseek_v3", "qwen3", "qwen3_moe", "llama_zero3", "vit", "dit", "llama"),
        "dense and tied (gpt2), encoder-decoder (t5), experts (mixtral); a Llama in test_zero_llama.py",
    ),
    Family(
        "test_context.py",
        "test_plans_for_a_context_axis",
        ("gpt_oss_cp-4-1", "deepseek_v3_cp-2-1", "llama_cp-2-2", "llama_cp-4-1", "qwen3_cp-2-2", "qwen3_moe_cp-2-2"),
        "gpt_oss_cp, gpt2_cp and mixtral_cp on cp x tp; a Llama on cp and dp x cp in test_context_parallel",
    ),
    Family(
        "test_context.py",
        "test_other_ways",
        ("deepseek_v3-ring-I(1, 2)", "llama-all_gather-S(1)", "llama-ulysses-S(1)"),
        "ring over contiguous rows and Ulysses over balanced ones; every method in test_context_parallel.py",
    ),
    Family(
        "test_mixtures.py",
        "test_z_loss_beside_the_load_balancing_loss",
        ("gpt_oss", "qwen3_moe"),
        "the same with mixtral",
    ),
    Family(
        "test_mixtures.py",
        "test_selection_biases_that_follow_the_load",
        ("{'dp': 1, 'tp': 4}",),
        "the same on dp=2,tp=2",
    ),
    Family(
        "test_llama.py",
        "test_gradients_equal_one_device",
        (
            ("('tp', 1, 2, 2, 4)", "('zoo', 1, 2, 2, 4)", "('zoo, gathered logits', 1, 2, 2, 4)")
            + (
                "('tp, replicated kv', 2, 2, 1, 4)",
                "('tp, replicated kv', 1, 2, 1, 4)",
                "('zoo, logits by vocabulary', 2, 2, 2, 4)",
            )
        )
        + ("('zoo, gathered logits', 2, 2, 2, 4)",),
        "the other plans on one mesh shape; the collectives of gathered logits",
    ),
    Family(
        "test_new_plans.py",
        "test_equal_to_one_device",
        tuple(name for name in CLASSES if name not in DAILY),
        "four classes of 48: an encoder, a decoder with fused heads, an encoder-decoder, images",
    ),
    Family(
        "test_new_plans.py",
        "test_sequence_and_zero",
        tuple(name for name in CLASSES if name != DAILY[0]),
        "one class of 48",
    ),
    Family("test_new_plans.py", "test_stages", ("1",), "stage 2; both stages in tests/runtime/test_units.py"),
    Family(
        "test_other_families.py",
        "test_step_equals_one_device",
        ("unet-dp", "swin-dp", "clip-dp", "bert-dp", "bert-tp", "resnet-tp"),
        "clip, swin and unet on tp, resnet, whose batch norm needs it, on dp; an encoder in test_new_plans.py",
    ),
    Family(
        "test_*reducer.py",
        "test_stock_dtensor_models",
        ("(2, 2, 2)", "(4, 2)"),
        "the same on (2, 2)",
    ),
    Family("test_*destinations.py", "test_64_simulated_ranks", (), _SIMULATED),
    Family("test_predicted_buckets.py", "test_three_axes_on_64_simulated_ranks", (), _SIMULATED),
    Family("test_*fuzz.py", "test_random_steps_on_simulated_ranks", ("(2, 2, 2)",), "the same on (4, 2) and (2, 2)"),
    Family(
        "test_training.py",
        "test_losses_follow_one_device",
        ("dp x tp", "tp"),
        "the same on fsdp; steps on dp x tp in rng",
    ),
    Family(
        "test_dtensor.py",
        "test_every_placement_on_eight_ranks",
        ("mesh_shape0", "mesh_shape2"),
        "the mesh (2, 4), and all ops on four ranks",
    ),
    Family("test_cuda.py", "test_the_gpu_benchmark_on_an_emulated_device", (), "the kernels on the emulated device"),
    Family("test_deferred.py", "test_llama_on_one_of_64_ranks_holds_its_shards_only", ("0-shard",), "rank 37, ragged"),
    Family(
        "test_redistribute.py",
        "test_every_pair_on_one_axis",
        (
            "shape0-3",
            "shape0-8",
            "shape1-2",
            "shape1-4",
            "shape1-8",
            "shape2-2",
            "shape2-3",
            "shape0-1",
            "shape0-2",
            "shape1-1",
            "shape2-8",
        ),
        "four combinations of shape and ranks",
    ),
    Family("test_big_meshes.py", "test_random_pairs_on_64_ranks", ("(64,)-4", "(2, 32)-3", "(4, 4, 4)-4"), "(8, 8)"),
    Family("test_growth.py", "test_steps", ("loop", "fused"), "the same with foreach"),
    Family("test_preconditioned.py", "test_has_the_bits_of_one_device", ("2", "4"), "the same on one and three ranks"),
    Family("test_muon.py", "test_has_the_bits_of_one_device", ("2", "4"), "the same on one and three ranks"),
    Family("test_native_fills.py", "test_functions", ("torch.float32", "torch.float64"), "the same in bfloat16"),
    Family(
        "test_native_fills.py",
        "test_in_place_fills",
        ("random_full", "random_from", "random_to", "log_normal", "random_wide"),
        "the same generator kernels with `random`, `random_from_to`, `cauchy` and `normal`",
    ),
    Family(
        "test_engine.py",
        "test_every_coordinate_gets_the_bits_of_one_device",
        tuple(
            f"many spans-{name}"
            for name in ("log_normal", "random_to", "random_from_to", "random_wide", "exponential", "bernoulli")
        ),
        "these ops in one span, and others over many spans",
    ),
    Family(
        "test_units.py",
        "test_same_bits_and_collectives",
        ("zero1-dpxtp", "zero2-dpxtp", "zero1-replicaxdp", "zero3-replicaxdp", "zero1-dp", "zero2-dp", "zero3-dp"),
        "ZeRO-3 on dp x tp, ZeRO-2 on replica x dp",
    ),
    Family("test_imported_before.py", "test_a_name_bound_before", ("stock", "ragged"), "the same with a generator"),
    Family("test_deferred.py", "test_deferred_models_train_as_on_one_device", ("tp", "ragged"), "both together"),
    Family("test_compile.py", "test_compiled_functions", ("eager",), "the same with aot_eager"),
    Family(
        "test_expert_sharding.py",
        "test_training_equals_one_device",
        ("qwen3_moe-on_dp_and_tp", "mixtral-on_fsdp_and_ep", "None-mask", "0-all_to_all", "2-mask"),
        "each dim and each way at least once",
    ),
    Family("test_exact_matches.py", "test_decisions_are_those_of_the_search", ("(2, 1, 2)",), "(8,) and (2, 4)"),
    Family("test_grid.py", "test_all_orders", ("gptoss_per_expert", "dsv3_moe"), "nine other models"),
    Family("test_in_place.py", "test_in_place_gradients", ("4",), "the same on two ranks"),
    Family("test_combinations.py", "test_random_programs", ("2", "3"), "the same on four ranks"),
    Family("test_random_programs.py", "test_random_programs", ("2",), "the same on four ranks"),
    Family(
        "test_demo.py",
        "test_no_process_outlives_the_command",
        ("9",),
        "the same with Ctrl-C; ranks killed in test_a_crashing_rank_ends_all",
    ),
    Family(
        "test_hf.py",
        "test_sharded_models",
        tuple(
            f"{name}-{kind}"
            for name in ("llama", "llama_zero3", "qwen3", "gpt2", "vit", "t5", "whisper", "dit", "sd3", "mixtral")
            + ("qwen3_moe", "gpt_oss", "deepseek_v3")
            for kind in ("plan", "fsdp")
            if (name, kind) not in (("mixtral", "plan"), ("gpt2", "fsdp"))
        ),
        "mixtral by a plan, gpt2 (tied) by fully_shard; all models on one device",
    ),
    Family(
        "test_static_hf.py",
        "test_numbers_of_eager_mode",
        ("mixtral:MixtralConfig", "inkling:InklingTextConfig"),
        "four other classes; mixtral by its plan in test_static_zoo.py",
    ),
    Family(
        "test_context_parallel.py",
        "test_llama",
        ("cp",),
        "the same with dp beside cp; attention by itself on cp=4",
    ),
    Family(
        "test_experts.py",
        "test_only_routed_tokens_move",
        ("0", "1"),
        "without sharded experts, and sharded on the last dim",
    ),
    Family("test_experts.py", "test_biases_features_and_axes_that_overlap", ("2-6",), "the same on four ranks"),
    Family(
        "test_predictions.py",
        "test_calls_and_bytes",
        ("tp-1-2-{}", "zoo-1-2-{}", "zoo-2-2-{}"),
        "both plans on dp=2,tp=2, tied or not",
    ),
    Family(
        "test_predictions.py",
        "test_channels_that_are_cut_and_statistics_of_a_batch",
        ("1-2-True", "2-2-False"),
        "the same on dp=2,tp=2 in training",
    ),
    Family(
        "test_uneven_batches.py",
        "test_batches",
        ("2-1-1", "4-3-5", "3-4-2"),
        "three other combinations of ranks, batch and length",
    ),
    Family("test_uneven_batches.py", "test_local_regions", ("4-5-False", "2-4-True"), "three other combinations"),
    Family("test_uneven_cuts.py", "test_vocabularies", ("2",), "the same on three ranks"),
    Family("test_uneven_cuts.py", "test_a_width_of_10", ("3",), "the same on four ranks"),
    Family(
        "test_zero_llama.py",
        "test_gradients_and_parameters_equal_one_device",
        ("dp,tp",),
        "the same with tied embeddings, on two meshes",
    ),
    Family(
        "test_precision.py",
        "test_autocast",
        ("llama",),
        "a convolutional network under autocast; dtypes of units in a Llama",
    ),
    Family(
        "test_steps.py",
        "test_net_in_two_stages",
        ("GPipe-1", "1F1B-4"),
        "GPipe with four micro-batches, 1F1B with eight",
    ),
    Family(
        "test_steps.py",
        "test_two_stages_on_each_rank",
        ("InterleavedZeroBubble", "ZBV", "LoopedBFS"),
        "Interleaved1F1B and DualPipeV; ZBV in test_composition.py, zero bubbles in tests/fsdp/test_pipelining.py",
    ),
    Family("test_steps.py", "test_gpt2_with_dropout_and_tied_head", ("0.0",), "the same with dropout"),
    Family(
        "test_steps.py",
        "test_llama",
        ("{'pp': 2}", "{'pp': 2, 'dp': 2, 'tp': 1}"),
        "pp with tp; dp beside pp in test_composition.py",
    ),
    Family(
        "test_steps.py",
        "test_checkpointed_blocks",
        ("full", "save"),
        "selective and offloaded; the bits of all policies in one test",
    ),
    Family(
        "test_split_backward.py",
        "test_weights_wait_for_the_second_half",
        ("full",),
        "without checkpoints and with offloaded ones",
    ),
    Family("test_adamw8bit_ranks.py", "test_engines", ("2",), "the same on three and four ranks"),
    Family(
        "test_adamw8bit_ranks.py",
        "test_checkpoints_onto_other_meshes",
        ("first1-second1", "first2-second2"),
        "one pair of meshes; full state dicts",
    ),
    Family("test_muon_features.py", "test_bytes_equal_the_bound", ("2",), "the same on four ranks"),
    Family(
        "test_muon_features.py",
        "test_trains_like_one_device",
        ("Muon-mesh_shape0-False",),
        "the same on another mesh; Shampoo and SOAP",
    ),
    Family("test_muon_features.py", "test_states_move_between_meshes", ("0", "2"), "one pair of meshes"),
    Family(
        "test_plans.py",
        "test_losses_of_a_plan_follow_one_device",
        ("shampoo", "soap"),
        "the same with Muon; Shampoo and SOAP on ranks in test_muon_features.py",
    ),
    Family(
        "test_redistribute.py",
        "test_random_pairs",
        ("(0, 1, 2)", "((0, 1), (2, 3))", "((0, 1, 2, 3), (4, 5, 6, 7))", "(((0, 1), (2, 3)), ((4, 5), (6, 7)))"),
        "the same on meshes whose ranks are not in order",
    ),
    Family(
        "test_redistribute.py", "test_meshes_over_a_part_of_the_world", ("(2,)", "((6,), (1,))"), "three other parts"
    ),
    Family(
        "test_redistribute.py",
        "test_distribute_tensor",
        ("(0, 1, 2, 3)", "(((0, 1), (2, 3)), ((4, 5), (6, 7)))"),
        "ranks that are not in order, a part of the world",
    ),
    Family(
        "test_options.py",
        "test_random_options",
        ("(0, 1, 2)", "(1, 3)", "((0, 1), (2, 3))"),
        "ranks that are not in order, and three axes",
    ),
    Family(
        "test_autograd.py",
        "test_random_pairs",
        ("(0, 1, 2)", "((0, 1), (2, 3))"),
        "ranks that are not in order, and three axes",
    ),
    Family("test_errors.py", "test_every_rank_raises", ("mesh_ranks1-8",), "the same on four ranks"),
    Family("test_checkpoint_state_dict.py", "test_model_state_dicts", ("flat",), "the same on two axes"),
    Family("test_checkpoint_state_dict.py", "test_optimizer_state_dicts", ("flat",), "the same on two axes"),
    Family(
        "test_checkpoint_state_dict.py",
        "test_training_state_moves_between_layouts",
        ("flat-grid-flattened", "grid-flat-nested"),
        "both directions, nested and flattened once",
    ),
    Family(
        "test_checkpoints.py", "test_static", ("by_plan", "by_model_in_units"), "by plan in units, by the model without"
    ),
    Family(
        "test_experts.py", "test_experts", ("all_to_all-whole",), "both ways once, whole and sharded sequences once"
    ),
    Family("test_*reducer.py", "test_local_modules", ("(8,)", "(4, 2)"), "the same on (2, 2, 2)"),
    Family("test_*reducer.py", "test_accumulation", ("(4,)",), "the same on (2, 2)"),
    Family(
        "test_breakpoint.py",
        "test_all_go_on_from_the_prompt_of_a_running_rank",
        (),
        "the prompt of a running rank, in the test before it",
    ),
    Family(
        "test_composition.py",
        "test_sequences_in_parts",
        ("context",),
        "a sharded sequence in stages; rings without stages in test_context.py",
    ),
    Family(
        "test_dtensor.py",
        "test_some_ops_on_any_number_of_ranks",
        ("8",),
        "one, two and three ranks; every op and placement on eight",
    ),
    Family("test_hostile.py", "test_memory_stays_small", (), "the same texts are refused in bounded time"),
    Family(
        "test_aliasing.py",
        "test_old_values_are_found_without_helpers",
        ("VESCALE_DISPATCH=stock",),
        "the same without any C++ helper",
    ),
    Family(
        "test_adapters.py",
        "test_training_as_on_one_device",
        ("llama-sizes1-after",),
        "adapters before `parallelize`, with entries",
    ),
]


def is_nightly(file: str, test: str, case: str | None) -> bool:
    """Whether ``test[case]`` of a file of this name is left to the nightly run."""
    return any(
        fnmatchcase(file, family.file) and test == family.test and (not family.cases or case in family.cases)
        for family in NIGHTLY
    )
