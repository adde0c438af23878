"""Cases that are left to `make test-slow`: what they run another case of the suite runs too."""

LONG_CASES = {
    "test_planning_search_published": {
        "test_what_is_found_is_at_most_a_tenth_slower_than_what_was_published[70B on 64 H100]",
    },
    "test_generate": {
        "test_greedy_with_cache_equals_the_whole_text_again_for_every_token[deepseek]",
        "test_a_padded_row_has_the_logits_of_the_row_alone[deepseek]",
    },
    "test_googlenet": {
        "test_every_mesh_computes_and_drops_the_same[{'fsdp': 2, 'tensor': 4, 'zero': 3}]",
    },
    "test_encoder_decoder": {
        "test_every_mesh_computes_and_drops_the_same[zero3_accumulation]",
        "test_every_mesh_computes_and_drops_the_same[zero1_blocked]",
        "test_every_mesh_computes_and_drops_the_same[zero2_sequence_parallel_remat]",
        "test_every_mesh_computes_and_drops_the_same[pipe_gpipe]",
        "test_every_mesh_computes_and_drops_the_same[pipe_of_four]",
        "test_every_mesh_computes_and_drops_the_same[pipe_interleaved_residuals]",
        "test_every_mesh_computes_and_drops_the_same[pipe_tied_zero3]",
    },
    "test_text_classification": {
        "test_every_mesh_tells_the_same",
    },
    "test_pipeline": {
        "test_loss_and_gradients_equal_one_device[residuals]",
    },
    "test_planning_traffic": {
        "test_everything_that_moves_is_explained_and_the_textbooks[pipe x fsdp, gpipe, tied]",
        "test_everything_that_moves_is_explained_and_the_textbooks[expert]",
        "test_everything_that_moves_is_explained_and_the_textbooks[ulysses, full]",
        "test_everything_that_moves_is_explained_and_the_textbooks[ring, layers of two kinds]",
        "test_everything_that_moves_is_explained_and_the_textbooks"
        "[accumulation x expert x data, zero 1]",
        "test_everything_that_moves_is_explained_and_the_textbooks"
        "[accumulation x fsdp x context, ring]",
        "test_the_modes_of_test_traffic[data, 2 microbatches]",
        "test_the_modes_of_test_traffic[data, 10 microbatches]",
        "test_the_modes_of_test_traffic[data gpt]",
        "test_the_modes_of_test_traffic[zero1, 2 microbatches]",
        "test_the_modes_of_test_traffic[tensor]",
        "test_the_modes_of_test_traffic[hsdp]",
        "test_the_modes_of_test_traffic[zero0]",
        "test_the_modes_of_test_traffic[zero1]",
        "test_the_modes_of_test_traffic[zero2]",
    },
    "test_reduction": {
        "test_gradients_of_many_microbatches_are_one_devices[zero 1, chunks, remat]",
        "test_gradients_of_many_microbatches_are_one_devices[ring, experts, chunks, remat]",
        "test_gradients_of_many_microbatches_are_one_devices[experts]",
    },
    "test_mixtral": {
        "test_loss_and_gradients_equal_one_device[capacity-expert_tensor_sequence]",
        "test_loss_and_gradients_equal_one_device[dropless-expert_tensor]",
        "test_loss_and_gradients_equal_one_device[dropless-expert8]",
        "test_loss_and_gradients_equal_one_device[dropless-expert_hsdp_zero2]",
        "test_loss_and_gradients_equal_one_device[capacity-expert_hsdp]",
    },
    "test_lora_dropout": {
        "test_any_mesh_and_accumulation_drop_the_same",
    },
    "test_planning_advice": {
        "test_where_one_change_is_not_enough_several_are_combined",
    },
    "test_pipeline_traffic": {
        "test_each_boundary_carries_each_microbatch_once_each_way[gpipe]",
    },
    "test_uneven": {
        "test_a_filled_batch_trains_as_its_rows_alone_on_one_device"
        "[moe-{'fsdp': 2, 'expert': 4}-()]",
    },
    "test_benchmarks_tpu": {
        "test_a_gather_inside_a_product_is_not_waited_for[v6e:2x2-2]",
        "test_a_large_product_takes_about_what_the_data_sheets_promise[7x]",
        "test_with_our_options_products_run_beside_gathers[v6e:2x2]",
        "test_with_our_options_products_run_beside_gathers[v6e:4x4]",
    },
    "test_optimizer_rules": {
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[sophia_g]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[sgd]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[muon]",
        "test_losses_and_evaluation_on_a_mesh_are_those_of_one_device[schedule_free-1]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[adam8bit]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[soap]",
    },
    "test_speculative": {
        "test_greedy_answers_are_the_plain_ones[mesh]",
    },
    "test_offload": {
        "test_a_step_is_that_of_a_state_on_the_devices[offload0-3]",
    },
    "test_parity_matrix": {
        "test_loss_and_gradients_equal_one_device[pipe_context]",
        "test_loss_and_gradients_equal_one_device[context]",
        "test_loss_and_gradients_equal_one_device[data_context]",
        "test_loss_and_gradients_equal_one_device[pipe_expert]",
        "test_loss_and_gradients_equal_one_device[context_tensor]",
        "test_loss_and_gradients_equal_one_device[fsdp_context]",
    },
    "test_resume": {
        "test_every_layout_goes_on_from_every_other[data-uneven]",
        "test_every_layout_goes_on_from_every_other[one-uneven]",
        "test_every_layout_trains_alike[data]",
        "test_every_layout_trains_alike[uneven]",
        "test_every_layout_trains_alike[tensor]",
    },
    "test_gemma": {
        "test_every_mesh_computes_the_same[gemma2-context_tensor_chunks]",
        "test_every_mesh_computes_the_same[gemma2-pipe]",
        "test_every_mesh_computes_the_same[gemma2-sequence_parallel]",
        "test_every_mesh_computes_the_same[gemma2-zero_bubble]",
        "test_every_mesh_computes_the_same[gemma3-pipe]",
        "test_every_mesh_computes_the_same[gemma3-zero_bubble]",
        "test_logits_and_every_gradient_equal_transformers[gemma2 all heads]",
        "test_logits_and_every_gradient_equal_transformers[gemma2 odd]",
        "test_logits_and_every_gradient_equal_transformers[gemma3 all heads]",
        "test_thirty_steps_have_the_losses_of_transformers[gemma]",
        "test_thirty_steps_have_the_losses_of_transformers[gemma2]",
    },
    "test_gpt_oss": {
        "test_every_mesh_computes_the_same[expert_tensor]",
        "test_every_mesh_computes_the_same[pipe]",
        "test_every_mesh_computes_the_same[capacity]",
        "test_every_mesh_computes_the_same[context_sequence_parallel]",
        "test_logits_and_every_gradient_equal_transformers[all_heads]",
        "test_logits_and_every_gradient_equal_transformers[odd]",
        "test_thirty_steps_have_the_losses_of_transformers",
    },
    "test_state_space": {
        "test_every_mesh_computes_the_same[mamba-sequence_parallel]",
        "test_every_mesh_computes_the_same[mamba2-sequence_parallel]",
        "test_every_mesh_computes_the_same[mamba2-pipe]",
    },
    "test_bert": {
        "test_every_mesh_computes_the_same[tensor_chunks]",
        "test_every_mesh_computes_the_same[context_sequence_parallel]",
    },
    "test_convnets": {
        "test_every_mesh_computes_and_drops_the_same[vgg-{'data': 8}]",
        "test_every_mesh_computes_and_drops_the_same[vgg-{'fsdp': 2, 'tensor': 4, 'zero': 2}]",
    },
    "test_qwen_moe": {
        "test_thirty_steps_have_the_losses_of_transformers",
    },
    "test_weights": {
        "test_with_the_weights_of_transformers_everything_is_as_there[diloco]",
    },
    "test_context_step": {
        "test_loss_and_gradients_equal_one_device[llama-ulysses]",
        "test_loss_and_gradients_equal_one_device[llama-data]",
    },
    "test_indivisible_layouts": {
        "test_three_stages_of_a_table_that_three_do_not_divide",
        "test_a_vocabulary_that_tensor_does_not_divide_equals_one_device[bert-mesh1-changes1]",
    },
    "test_bucket_runs": {
        "test_a_bucket_that_is_lost_costs_nothing_that_was_saved",
        "test_a_damaged_checkpoint_is_put_aside_and_the_one_before_it_used",
        "test_a_trainer_of_its_own_keeps_its_run_in_a_bucket",
    },
    "test_allocation": {
        "test_a_program_takes_next_to_no_fresh_pages",
    },
    "test_planning_search_field": {
        "test_where_nothing_fits_the_ways_out_are_true",
    },
    "test_pair_runs": {
        "test_a_plan_knows_the_step",
    },
    "test_finetune_freeze": {
        "test_gradients_of_the_rest_are_those_of_a_model_that_trains_whole[zero bubble, residuals]",
    },
    "test_lora": {
        "test_gradients_are_the_formulas_on_every_mesh[zero 2, microbatches]",
        "test_gradients_are_the_formulas_on_every_mesh[zero bubble, residuals]",
    },
    "test_qlora": {
        "test_losses_and_gradients_are_those_of_the_floats_on_every_mesh[1f1b, int8]",
    },
    "test_sweep": {
        "test_a_sweep_trains_each_once_and_shows_them",
    },
    "test_chaos": {
        "test_random_faults_leave_no_trace_in_the_result[17-1]",
    },
    "test_t5": {
        "test_logits_and_every_gradient_equal_transformers[odd]",
    },
    "test_recipes": {
        "test_the_recipes_of_an_objective_optimizer_kernel_and_remat_policy",
        "test_the_recipe_of_a_model_outside_the_package",
        "test_the_recipe_of_a_target_is_planned_for_with_them",
    },
    "test_cli": {
        "test_a_run_of_an_imported_model_is_evaluated_and_repeated",
        "test_a_run_whose_output_nobody_reads_any_more_saves_and_says_so",
        "test_a_run_whose_terminal_is_closed_saves_and_exits_with_75",
    },
    "test_chat_mode": {
        "test_a_model_of_bytes_learns_turns_and_talks",
    },
    "test_python_page": {
        "test_the_blocks_run_in_order",
    },
    "test_huggingface_models": {
        "test_a_model_comes_in_gives_the_same_logits_and_goes_out_again[gpt-oss]",
    },
    "test_confusion": {
        "test_every_mesh_counts_as_scikit_learn_does[gru]",
    },
    "test_quantize": {
        "test_a_run_in_four_bits_is_autoawqs_folder_and_transformers_model",
    },
}
