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
        "test_all_heads_and_every_gradient_equal_torch[plain]",
    },
    "test_encoder_decoder": {
        "test_every_mesh_computes_and_drops_the_same[zero3_accumulation]",
        "test_every_mesh_computes_and_drops_the_same[zero1_blocked]",
        "test_every_mesh_computes_and_drops_the_same[zero2_sequence_parallel_remat]",
        "test_every_mesh_computes_and_drops_the_same[pipe_gpipe]",
        "test_every_mesh_computes_and_drops_the_same[pipe_of_four]",
        "test_every_mesh_computes_and_drops_the_same[pipe_interleaved_residuals]",
        "test_every_mesh_computes_and_drops_the_same[pipe_tied_zero3]",
        "test_logits_and_every_gradient_equal_pytorch[pre_one_head]",
        "test_of_several_answers_the_one_that_greedy_decoding_tells_is_a_match[transformer]",
    },
    "test_text_classification": {
        "test_every_mesh_tells_the_same",
    },
    "test_pipeline": {
        "test_loss_and_gradients_equal_one_device[residuals]",
        "test_loss_and_gradients_equal_one_device[1f1b]",
        "test_loss_and_gradients_equal_one_device[fewer_microbatches_than_stages]",
        "test_loss_and_gradients_equal_one_device[gpipe]",
        "test_a_ring_of_attention_inside_stages_equals_one_device[1f1b, fsdp]",
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
        "test_everything_that_moves_is_explained_and_the_textbooks[ring]",
        "test_everything_that_moves_is_explained_and_the_textbooks[pipe x data, 1f1b]",
        "test_everything_that_moves_is_explained_and_the_textbooks[sequence parallel, chunks]",
        "test_everything_that_moves_is_explained_and_the_textbooks[data x tensor, tied]",
        "test_everything_that_moves_is_explained_and_the_textbooks"
        "[fsdp x tensor, sequence parallel, named]",
        "test_the_modes_of_test_traffic[replicas, zero1, 2 microbatches]",
        "test_the_modes_of_test_traffic[sequence]",
        "test_the_modes_of_test_traffic[zero3]",
        "test_the_modes_of_test_traffic[data]",
        "test_gradients_cross_context_and_expert_once_whatever_the_number_of_microbatches"
        "[accumulation x fsdp x context, ring]",
    },
    "test_reduction": {
        "test_gradients_of_many_microbatches_are_one_devices[zero 1, chunks, remat]",
        "test_gradients_of_many_microbatches_are_one_devices[ring, experts, chunks, remat]",
        "test_gradients_of_many_microbatches_are_one_devices[experts]",
        "test_gradients_of_many_microbatches_are_one_devices[zero bubble, zero 1]",
    },
    "test_mixtral": {
        "test_loss_and_gradients_equal_one_device[capacity-expert_tensor_sequence]",
        "test_loss_and_gradients_equal_one_device[dropless-expert_tensor]",
        "test_loss_and_gradients_equal_one_device[dropless-expert8]",
        "test_loss_and_gradients_equal_one_device[dropless-expert_hsdp_zero2]",
        "test_loss_and_gradients_equal_one_device[capacity-expert_hsdp]",
        "test_two_exchanges_of_the_closed_form_and_each_rank_its_experts[capacity]",
    },
    "test_lora_dropout": {
        "test_any_mesh_and_accumulation_drop_the_same[False]",
    },
    "test_planning_advice": {
        "test_where_one_change_is_not_enough_several_are_combined",
    },
    "test_pipeline_traffic": {
        "test_a_ring_inside_stages_moves_what_the_textbook_says[1f1b]",
        "test_each_boundary_carries_each_microbatch_once_each_way[gpipe]",
        "test_each_boundary_carries_each_microbatch_once_each_way[1f1b]",
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
        "test_with_our_options_products_run_beside_gathers[v5p:2x2x2]",
        "test_a_large_product_takes_about_what_the_data_sheets_promise[v4]",
        "test_a_large_product_takes_about_what_the_data_sheets_promise[v5p]",
    },
    "test_optimizer_rules": {
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[sophia_g]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[sgd]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[muon]",
        "test_losses_and_evaluation_on_a_mesh_are_those_of_one_device[schedule_free-1]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[adam8bit]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[soap]",
        "test_updates_on_a_mesh_are_those_of_one_device[adam8bit-{'fsdp': 8}]",
        "test_a_run_keeps_what_its_rule_says_and_goes_on_bit_for_bit[schedule_free]",
        "test_losses_and_evaluation_on_a_mesh_are_those_of_one_device[muon-2]",
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
        "test_every_layout_goes_on_from_every_other[one-tensor]",
        "test_every_layout_goes_on_from_every_other[one-data]",
        "test_every_layout_goes_on_from_every_other[interleaved-data]",
        "test_every_layout_goes_on_from_every_other[interleaved-tensor]",
        "test_every_layout_goes_on_from_every_other[uneven-tensor]",
        "test_every_layout_goes_on_from_every_other[uneven-data]",
        "test_every_layout_goes_on_from_every_other[data-interleaved]",
        "test_every_layout_goes_on_from_every_other[tensor-zero3]",
        "test_every_layout_goes_on_from_every_other[zero1-tensor]",
        "test_every_layout_goes_on_from_every_other[tensor-uneven]",
        "test_every_layout_goes_on_from_every_other[zero3-tensor]",
        "test_every_layout_goes_on_from_every_other[tensor-data]",
        "test_every_layout_goes_on_from_every_other[data-tensor]",
        "test_every_layout_goes_on_from_every_other[tensor-accumulated]",
        "test_every_layout_goes_on_from_every_other[tensor-interleaved]",
        "test_every_layout_goes_on_from_every_other[data-zero3]",
        "test_every_layout_goes_on_from_every_other[accumulated-data]",
        "test_every_layout_goes_on_from_every_other[accumulated-tensor]",
        "test_every_layout_goes_on_from_every_other[tensor-tensor]",
        "test_every_layout_goes_on_from_every_other[tensor-zero1]",
        "test_every_layout_goes_on_from_every_other[data-zero1]",
        "test_every_layout_goes_on_from_every_other[zero3-data]",
        "test_every_layout_goes_on_from_every_other[data-data]",
        "test_every_layout_goes_on_from_every_other[zero1-data]",
        "test_every_layout_goes_on_from_every_other[data-accumulated]",
        "test_every_layout_goes_on_from_every_other[data-one]",
        "test_every_layout_goes_on_from_every_other[tensor-one]",
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
        "test_every_mesh_computes_the_same[gemma-context_tensor_chunks]",
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
        "test_every_mesh_computes_the_same[mamba-tensor]",
        "test_thirty_steps_have_the_losses_of_transformers[mamba]",
    },
    "test_bert": {
        "test_every_mesh_computes_the_same[tensor_chunks]",
        "test_every_mesh_computes_the_same[context_sequence_parallel]",
        "test_logits_and_every_gradient_equal_transformers[small]",
    },
    "test_convnets": {
        "test_every_mesh_computes_and_drops_the_same[vgg-{'data': 8}]",
        "test_every_mesh_computes_and_drops_the_same[vgg-{'fsdp': 2, 'tensor': 4, 'zero': 2}]",
        "test_every_mesh_computes_and_drops_the_same[alexnet-{'data': 2, 'tensor': 4, 'zero': 1}]",
        "test_outputs_and_every_gradient_equal_torch[alexnet]",
        "test_outputs_and_every_gradient_equal_torch[vgg11]",
    },
    "test_qwen_moe": {
        "test_thirty_steps_have_the_losses_of_transformers",
        "test_logits_and_every_gradient_equal_transformers[small]",
    },
    "test_weights": {
        "test_with_the_weights_of_transformers_everything_is_as_there[diloco]",
        "test_with_the_weights_of_transformers_everything_is_as_there[one device]",
        "test_with_the_weights_of_transformers_everything_is_as_there[zero 1, int8]",
    },
    "test_context_step": {
        "test_loss_and_gradients_equal_one_device[llama-ulysses]",
        "test_loss_and_gradients_equal_one_device[llama-data]",
        "test_loss_and_gradients_equal_one_device[gpt-sequence]",
        "test_a_step_gathers_no_activations_over_context[ulysses]",
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
        "test_cached_decoding_tells_what_uncached_does[seq2seq]",
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
        "test_the_recipe_s_model_is_planned",
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
        "test_a_model_comes_in_gives_the_same_logits_and_goes_out_again[llama]",
        "test_a_model_comes_in_gives_the_same_logits_and_goes_out_again[mistral]",
        "test_a_model_comes_in_gives_the_same_logits_and_goes_out_again[qwen2]",
        "test_two_layers_parts_at_most_are_held_while_reading[Mesh.data=8]",
        "test_a_model_comes_in_gives_the_same_logits_and_goes_out_again[roberta-odd]",
        "test_a_model_comes_in_gives_the_same_logits_and_goes_out_again[qwen3-moe]",
    },
    "test_confusion": {
        "test_every_mesh_counts_as_scikit_learn_does[gru]",
    },
    "test_quantize": {
        "test_a_run_in_four_bits_is_autoawqs_folder_and_transformers_model",
    },
    "test_traffic": {
        "test_traffic_equals_the_closed_form[replicas, zero1, 2 microbatches]",
        "test_traffic_equals_the_closed_form[data, 10 microbatches]",
        "test_traffic_equals_the_closed_form[data gpt]",
        "test_traffic_equals_the_closed_form[zero0]",
    },
    "test_memory_contract": {
        "test_arguments_equal_the_zero_table[llama-bfloat16-1-{'fsdp': 8}]",
        "test_arguments_equal_the_zero_table[llama-moments-3-{'data': 2, 'fsdp': 4}]",
        "test_arguments_equal_the_zero_table[llama-moments-1-{'fsdp': 8}]",
        "test_arguments_equal_the_zero_table[llama-moments-0-{'fsdp': 8}]",
        "test_arguments_equal_the_zero_table[llama-mixed-1-{'fsdp': 8}]",
        "test_arguments_equal_the_zero_table[gpt-float32-0-{'fsdp': 8}]",
        "test_arguments_equal_the_zero_table[gpt-float32-1-{'fsdp': 8}]",
    },
    "test_planning_memory": {
        "test_arguments_are_those_of_the_compiled_step_to_the_byte[zero 1]",
        "test_arguments_are_those_of_the_compiled_step_to_the_byte[zero 0]",
    },
    "test_step": {
        "test_loss_and_gradients_equal_one_device[gpt-rows_zero2]",
        "test_loss_and_gradients_equal_one_device[gpt-rows_zero1]",
        "test_loss_and_gradients_equal_one_device[gpt-tensor8]",
        "test_loss_and_gradients_equal_one_device[gpt-all]",
        "test_loss_and_gradients_equal_one_device[gpt-zero0]",
        "test_loss_and_gradients_equal_one_device[gpt-zero1]",
        "test_zero3_holds_one_gathered_layer_at_a_time[none]",
        "test_accumulation_equals_the_big_batch_although_token_counts_differ"
        "[{'data': 2, 'fsdp': 2, 'zero': 2}]",
        "test_gradients_of_tokens_nobody_saw_are_exactly_zero[all]",
        "test_gradients_of_tokens_nobody_saw_are_exactly_zero[tensor8]",
    },
    "test_corruption": {
        "test_trained_replicas_are_equal_and_a_replayed_step_too[zero1]",
        "test_trained_replicas_are_equal_and_a_replayed_step_too[zero3]",
        "test_trained_replicas_are_equal_and_a_replayed_step_too[data8]",
    },
    "test_tensor_layouts": {
        "test_loss_and_gradients_equal_one_device[gpt-2d]",
        "test_loss_and_gradients_equal_one_device[gpt-3d]",
        "test_fewer_key_value_heads_than_devices[tensor8]",
        "test_a_product_in_a_cube_is_two_gathers_and_a_reduce_scatter[out_of]",
    },
    "test_masked_token": {
        "test_a_step_on_a_mesh_equals_one_device[context]",
    },
    "test_dpo": {
        "test_a_step_on_a_mesh_equals_one_device[context]",
    },
    "test_exchange_traffic": {
        "test_the_inner_step_moves_nothing_over_data[local_sgd-{'data': 4}]",
        "test_the_inner_step_moves_nothing_over_data[diloco-{'data': 2, 'fsdp': 2, 'tensor': 2}]",
        "test_top_k_moves_values_and_places_of_what_it_keeps[{'data': 4}]",
        "test_gossip_permutes_with_its_neighbours_and_nothing_else[{'data': 4}]",
        "test_int8_moves_a_byte_a_number_each_way[{'data': 4}]",
    },
    "test_compiled_step": {
        "test_a_proof_takes_the_step_of_a_run[accumulated]",
        "test_a_plan_lowers_what_a_run_lowers[replicas]",
    },
    "test_exchange_compression": {
        "test_sending_every_entry_is_the_synchronous_step[{'data': 4, 'fsdp': 2}]",
        "test_int8_is_the_synchronous_step_to_its_rounding"
        "[{'data': 2, 'fsdp': 2, 'tensor': 2, 'zero': 2}]",
    },
    "test_exchange": {
        "test_averaging_after_every_step_is_the_synchronous_step[{'data': 4, 'fsdp': 2}]",
    },
    "test_guard_step": {
        "test_a_bad_step_changes_nothing_and_the_next_is_as_if_it_had_not_been[zero3_tensor]",
    },
    "test_resnet": {
        "test_losses_gradients_and_statistics_are_of_the_global_batch[hsdp_zero2]",
        "test_losses_gradients_and_statistics_are_of_the_global_batch[data_tensor]",
    },
    "test_recurrent": {
        "test_every_mesh_computes_the_same[rnn-{'data': 2, 'fsdp': 4, 'zero': 1}]",
        "test_every_mesh_computes_the_same[rnn-{'data': 8}]",
    },
    "test_run_ahead": {
        "test_averaged_parameters_lie_as_the_parameters_do[1]",
    },
    "test_optimizer_sophia": {
        "test_estimates_and_steps_on_a_mesh_are_those_of_one_device"
        "[{'data': 2, 'fsdp': 2, 'zero': 2}]",
    },
    "test_loss_scale_on_a_mesh": {
        "test_an_overflow_of_one_device_skips_the_step_on_all[1]",
    },
    "test_train": {
        "test_stopped_and_continued_equals_never_stopped_bit_for_bit[4]",
    },
    "test_data_pipeline": {
        'test_two_processes_make_and_place_their_own_rows[P("fsdp", "data")-rows2]',
        'test_two_processes_make_and_place_their_own_rows[P(("data", "fsdp"))-rows0]',
    },
    "test_vit": {
        "test_every_mesh_computes_the_same[{'data': 2, 'fsdp': 2, 'tensor': 2, 'zero': 2}]",
    },
    "test_models_interface": {
        "test_attention_looks_where_the_facts_say[DeepSeek]",
    },
    "test_float8": {
        "test_experts_on_a_mesh_are_those_of_one_device[None]",
    },
    "test_absent_tpus": {
        "test_a_process_that_opens_the_devices_writes_no_error[beside a GPU]",
    },
    "test_launch_scripts": {
        "test_a_dry_run_prints_exactly_what_is_run"
        "[watch -- train gpt2_124m -b Train.data = @TextData() -b TextData.source='a b'-answe"
        "rs14-10]",
    },
    "test_context": {
        "test_attention_equals_one_device[window-both-ways-4-ring]",
        "test_attention_equals_one_device[documents-4-ring]",
    },
    "test_planning_plan": {
        "test_where_no_compiler_is_installed_the_plan_is_an_estimate_that_says_so[True]",
    },
    "test_seq2seq": {
        "test_a_search_that_is_wide_enough_finds_the_likeliest_of_all_targets[attends]",
    },
    "test_generate_text": {
        "test_guesses_change_no_greedy_answer_and_are_counted[itself]",
    },
    "test_finetune_fresh": {
        "test_named_parts_are_drawn_and_the_others_are_the_runs[tensor]",
    },
    "test_exchange_streaming": {
        "test_twenty_steps_are_those_of_a_loop"
        "[{'data': 4}-Exchange(method='diloco', period=5, outer_learning_rate=0.7, outer_mome"
        "ntum=0.9, fragments=2, delay=3, mixing=0.25, keep=0.01, rank=4, graph='ring', stalen"
        "ess=1, compensation=0.0)]",
    },
    "test_moments": {
        "test_a_resumed_run_is_the_run_never_stopped_bit_for_bit[{'pipe': 2, 'fsdp': 2}]",
    },
    "test_exchange_relaxed": {
        "test_what_moves_is_its_formula[power_sgd]",
    },
    "test_generate_transformers": {
        "test_greedy_of_a_padded_batch_and_the_log_probabilities[mixtral]",
    },
    "test_verify": {
        "test_a_restore_that_is_not_exact_fails_resume[position]",
    },
    "test_distributed": {
        "test_jax_leaves_time_to_say_who_was_lost[1]",
    },
    "test_loss": {
        "test_chunked_equals_whole[4-2]",
        "test_chunked_equals_whole[1-1]",
    },
}
