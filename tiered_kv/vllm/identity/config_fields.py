"""Table of vLLM's configuration fields: which of them may change KV.

Owns the judgement, field by field and variable by variable, of vLLM 0.30 to 0.33. Must not read a configuration:
``config_values.py`` does, and what this table does not know enters the namespace. The tests hold it against the sources
of these versions (tests/vllm/test_config_fields.py).

A row is of one of three kinds.

``enters``
    Its value is part of the namespace. Whatever changes how KV is computed or laid out in a way that does not average
    out, and whatever is uncertain: a needless second namespace costs misses, a missing one wrong answers. What only
    recurrent layers read (``recurrent``) enters for models that have some.
``elsewhere``
    Another part of the identity says it, by name: a field of the namespace, the extras in the keys, or the refusal in
    ``supported.check_supported``.
``cannot``
    It does not change KV, with the reason. Two reasons recur. ``ROUNDING``: the same operations in another order,
    grouping or kernel of the same precision; batch size does that from step to step in any engine. ``PLACE``: this
    process, rank or machine, where engines that ought to share differ.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

ENVIRONMENT: Final = "environment"
"""Stands for ``vllm.envs`` where others name a part of the configuration."""


@dataclass(frozen=True)
class Section:
    """One class of vLLM's configuration, or its environment variables.

    Names are separated by spaces.

    Attributes:
        of: Name of the class.
        enters: Fields whose value enters.
        files: Fields that name a file whose content enters.
        secret: Fields that enter as a digest: what they hold may be a user's secret.
        recurrent: Fields whose value enters where the model has recurrent layers (Mamba, linear attention), which alone
            read them.
        elsewhere: Where it is said -> fields.
        cannot: Why it cannot change KV -> fields.
        parts: Fields that hold a section of their own.
    """

    of: str
    enters: str = ""
    files: str = ""
    secret: str = ""
    recurrent: str = ""
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    parts: str = ""


ROUNDING: Final = "the same operations in another order, grouping or kernel: rounding, as batch size changes it anyway"
PLACE: Final = "says where this process, rank or machine is, or how they reach each other"
MEMORY: Final = "how much memory there is and where things lie in it"
SCHEDULING: Final = "decides what is computed when: batches differ, which is rounding"
SAMPLING: Final = "acts on logits or tokens, behind KV"
WATCHING: Final = "logs, measures, traces or limits time; computes nothing"
SERVING: Final = "of the API server or the client: what reaches the engine are tokens and media, which the keys say"
BUILDING: Final = "how vLLM is built, compiled, warmed up or cached on disk"
LIMIT: Final = "refuses requests that are larger; those it takes are computed alike"
DRAFTS: Final = "of guesses: they are verified, and what a draft writes for them is written again once a token is known"
DEFAULTS: Final = "sets the defaults of other fields, which are read themselves"
LOADING: Final = "how fast and in which order the same weights are read"
OTHER_CONNECTORS: Final = "of other connectors"

TABLE: Final[Mapping[str, Section]] = {
    "": Section(
        of="VllmConfig",
        secret="additional_config",
        elsewhere={"quantization, text_config, settings.model_files": "quant_config"},
        cannot={
            DEFAULTS: "optimization_level performance_mode",
            PLACE: "instance_id",
            WATCHING: "shutdown_timeout",
        },
        parts="model_config cache_config parallel_config scheduler_config device_config load_config offload_config "
        "attention_config aux_output_config engram_config mamba_config kernel_config lora_config speculative_config "
        "watermark_config diffusion_config structured_outputs_config observability_config logging_config "
        "compilation_config profiler_config kv_transfer_config kv_events_config ec_transfer_config ec_manager_config "
        "reasoning_config weight_transfer_config watchdog_config",
    ),
    "model_config": Section(
        of="ModelConfig",
        enters="runner convert disable_sliding_window model_impl model_class_overrides",
        elsewhere={
            "weights": "model model_weights revision word_embeddings_untied_by_checkpoint seed",
            "text_config, outer_config_sha256": "hf_config hf_text_config hf_config_path hf_overrides config_format",
            "settings.model_files": "trust_remote_code code_revision",
            "model_dtype": "dtype",
            "max_model_len": "max_model_len",
            "quantization": "quantization quantization_config",
            "keys, which are of token ids": "tokenizer tokenizer_mode tokenizer_revision io_processor_plugin",
            "keys, which hash prompt embeddings": "enable_prompt_embeds",
            "check_supported, which refuses it": "enable_return_routed_experts",
        },
        cannot={
            ROUNDING: "enforce_eager disable_cascade_attn",
            SAMPLING: "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel generation_config "
            "override_generation_config logits_processors pooler_config",
            SERVING: "allowed_local_media_path allowed_media_domains skip_tokenizer_init served_model_name hf_token "
            "renderer_num_workers",
            MEMORY: "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph "
            "enable_nccl_comm_suspend enable_cumem_allocator",
            WATCHING: "enable_trace_replay",
            DRAFTS: "spec_target_max_model_len",
            "says that this is a part of another model's configuration": "is_submodel_config",
            "allows a method, which is read itself": "allow_deprecated_quantization",
        },
        parts="multimodal_config",
    ),
    "model_config.multimodal_config": Section(
        of="MultiModalConfig",
        enters="media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_backend "
        "mm_encoder_attn_dtype video_pruning_rate video_pruning_method allow_missing_mm_embeddings mm_encoder_only",
        files="mm_encoder_fp8_scale_path",
        elsewhere={
            "keys, which hold each item's hash": "mm_hasher_algorithm enable_mm_embeds",
            "keys, which are of token ids": "interleave_mm_strings",
        },
        cannot={
            LIMIT: "limit_per_prompt language_model_only",
            MEMORY: "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb skip_mm_profiling "
            "mm_tensor_ipc mm_ipc_gpu_memory_gb",
            ROUNDING: "mm_encoder_tp_mode",
            "writes scales for later engines": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        },
    ),
    "cache_config": Section(
        of="CacheConfig",
        enters="kv_sharing_fast_prefill",
        recurrent="mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode replayssm_buffer_len "
        "use_replayssm use_kda_recoverssm",
        elsewhere={
            "block_tokens": "block_size user_specified_block_size effective_attention_block_size _block_size_resolved "
            "mamba_block_size user_specified_mamba_block_size",
            "kv_layout": "kv_cache_layout",
            "kv_dtype": "cache_dtype",
            "kv_encoding, geometry": "kv_cache_dtype_skip_layers skip_page_size_padded",
            "text_config, settings.model_config.disable_sliding_window": "sliding_window",
            "text_config": "is_attention_free",
        },
        cannot={
            MEMORY: "mamba_page_size_padded gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks "
            "num_cpu_blocks kv_cache_size_tokens kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size "
            "kv_offloading_backend simple_cpu_offload_num_blocks",
            "which blocks and states vLLM's own prefix cache finds": "prefix_match_unit enable_prefix_caching "
            "prefix_caching_hash_algo prefix_cache_retention_interval hash_block_size cache_hit_alignment_tokens "
            "enable_mamba_shared_prefix_checkpoint enable_mamba_fine_grained_prefix_cache",
            "keeps windows out of the prefix cache: such groups are refused": "swa_bounded_replay",
        },
    ),
    "parallel_config": Section(
        of="ParallelConfig",
        enters="worker_cls worker_extension_cls sd_worker_cls",
        elsewhere={
            "tp": "tensor_parallel_size",
            "pp": "pipeline_parallel_size",
            "tp, pp, dcp": "world_size",
            "dcp": "decode_context_parallel_size",
            "dcp_interleave": "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size "
            "_allow_auto_resolve_cp_interleave_size",
            "check_supported, which refuses it": "prefill_context_parallel_size nnodes",
            "text_config": "is_moe_model",
            # It fills dummy weights with its peers': weights.py gives those no name then.
            "weights": "enable_elastic_ep",
        },
        cannot={
            PLACE: "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local "
            "data_parallel_master_ip data_parallel_rpc_port dp_sync_interval data_parallel_master_port "
            "data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index "
            "ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend master_addr "
            "master_port node_rank numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids rank "
            "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank",
            ROUNDING: "enable_hc_sp enable_expert_parallel enable_eplb expert_placement_strategy all2all_backend "
            "disable_custom_all_reduce elastic_ep_max_dp_size enable_dbo ubatch_size "
            "dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization "
            "dcp_comm_backend dcp_q_replicate",
            LOADING: "enable_ep_weight_filter max_parallel_loading_workers",
            MEMORY: "enable_shm_tensor_arena",
            SAMPLING: "enable_batch_sharded_sampling",
            WATCHING: "distributed_timeout_seconds cpu_distributed_timeout_seconds enable_fault_tolerance",
        },
        parts="eplb_config fault_tolerance_config",
    ),
    "parallel_config.eplb_config": Section(
        of="EPLBConfig",
        cannot={
            "moves experts between ranks: each is computed alike wherever it is": "window_size step_interval "
            "num_redundant_experts log_balancedness log_balancedness_interval use_async policy communicator "
            "enable_migration_batching"
        },
    ),
    "parallel_config.fault_tolerance_config": Section(
        of="FaultToleranceConfig", cannot={WATCHING: "engine_recovery_timeout_sec"}
    ),
    "scheduler_config": Section(
        of="SchedulerConfig",
        elsewhere={
            "geometry": "disable_hybrid_kv_cache_manager",
            "settings.model_config.runner": "runner_type",
            "text_config, outer_config_sha256": "is_multimodal_model",
        },
        cannot={
            SCHEDULING: "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs "
            "long_prefill_token_threshold long_prefill_token_threshold_adaptive enable_chunked_prefill "
            "max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input scheduler_cls "
            "async_scheduling stream_interval scheduler_reserve_full_isl watermark prefill_schedule_interval",
            LIMIT: "max_num_queued_reqs max_num_queued_tokens",
        },
    ),
    "device_config": Section(of="DeviceConfig", elsewhere={"kv_encoding": "device device_type"}),
    "load_config": Section(
        of="LoadConfig",
        elsewhere={"weights": "load_format model_loader_extra_config ignore_patterns download_dir"},
        cannot={
            LOADING: "device safetensors_load_strategy safetensors_prefetch_num_threads "
            "safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location"
        },
    ),
    "offload_config": Section(of="OffloadConfig", cannot={MEMORY: "offload_backend"}, parts="uva prefetch"),
    "offload_config.uva": Section(of="UVAOffloadConfig", cannot={MEMORY: "cpu_offload_gb cpu_offload_params"}),
    "offload_config.prefetch": Section(
        of="PrefetchOffloadConfig",
        cannot={MEMORY: "offload_group_size offload_num_in_group offload_params offload_prefetch_step"},
    ),
    "attention_config": Section(
        of="AttentionConfig",
        enters="minimax_m3_msa_decode_backend flash_attn_version use_trtllm_attention trtllm_ragged_backend "
        "disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype "
        "indexer_sparse_logits minimax_m3_indexer_cp use_non_causal sparse_mla_force_mqa",
        elsewhere={
            "kv_encoding, attention_backend": "backend backend_per_kind",
            "check_supported, which refuses it": "hisparse_config",
        },
        cannot={
            ROUNDING: "flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv "
            "tq_max_kv_splits_for_cuda_graph sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n "
            "flex_attn_q_block_size flex_attn_kv_block_size indexer_tp_shard_min_rows"
        },
    ),
    "aux_output_config": Section(
        of="AuxOutputConfig",
        elsewhere={"check_supported, which refuses it": "enable_return_routed_experts"},
        cannot={LIMIT: "max_bytes"},
    ),
    "engram_config": Section(
        of="EngramConfig", cannot={MEMORY: "cpu_offload embedding_across_dp dp_shared_memory use_thp"}
    ),
    "mamba_config": Section(
        of="MambaConfig",
        recurrent="backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
    ),
    "kernel_config": Section(
        of="KernelConfig",
        # These choose the precision of what goes into a product, too: W4A16 or W4A4 of the same weights.
        enters="moe_backend linear_backend linear_backend_per_quant sparse_indexer_topk_backend monokernel",
        cannot={
            BUILDING: "enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup "
            "enable_jit_warmup"
        },
        parts="ir_op_priority",
    ),
    "kernel_config.ir_op_priority": Section(
        of="IrOpPriorityConfig", cannot={ROUNDING: "rms_norm fused_add_rms_norm gelu_and_mul_sparse"}
    ),
    "lora_config": Section(
        of="LoRAConfig",
        elsewhere={
            # KV without an adapter is the same with LoRA and without it: engines of both kinds share it.
            "keys, in the adapter's identity": "lora_dtype target_modules enable_tower_connector_lora "
            "enable_mixed_moe_lora_format enable_moe_shared_loras",
            "keys, which name the adapter": "default_mm_loras",
        },
        cannot={
            MEMORY: "max_lora_rank max_loras max_cpu_loras",
            ROUNDING: "fully_sharded_loras specialize_active_lora",
            SAMPLING: "max_lora_cls_labels",
        },
    ),
    "speculative_config": Section(
        of="SpeculativeConfig",
        elsewhere={
            "draft": "method model quantization moe_backend kv_cache_dtype max_model_len revision code_revision "
            "index_share_for_mtp_iteration disable_eagle_block_drop use_heterogeneous_vocab draft_model_config "
            "draft_parallel_config draft_tensor_parallel_size tensor_parallel_size draft_load_config",
            "kv_encoding, attention_backend": "attention_backend",
            "check_drafts, which refuses it": "parallel_drafting num_speculative_tokens_per_batch_size",
        },
        cannot={
            DRAFTS: "enforce_eager num_speculative_tokens disable_padded_drafter_batch use_local_argmax_reduction "
            "prompt_lookup_max prompt_lookup_min target_model_config target_parallel_config "
            "suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
            "suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates "
            "synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk "
            "disable_lookahead_block_hashes draft_lm_head_quantization fly_entropy_threshold fly_entropy_top_k "
            "fly_window_size xpress_topc"
        },
    ),
    "watermark_config": Section(
        of="WatermarkConfig",
        cannot={
            SAMPLING: "key algorithm alpha context_width deduplicate_contexts deduplicate_contexts_max_history prf "
            "allow_target_only_watermarking"
        },
    ),
    "diffusion_config": Section(of="DiffusionConfig", enters="canvas_length max_denoising_steps"),
    "structured_outputs_config": Section(
        of="StructuredOutputsConfig",
        cannot={
            SAMPLING: "backend disable_any_whitespace disable_additional_properties reasoning_parser "
            "reasoning_parser_plugin enable_in_reasoning"
        },
    ),
    "observability_config": Section(
        of="ObservabilityConfig",
        cannot={
            WATCHING: "show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces "
            "per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets "
            "cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_mm_processor_stats "
            "enable_logging_iteration_details jit_monitor_mode jit_monitor_verbose"
        },
    ),
    "logging_config": Section(
        of="LoggingConfig", cannot={WATCHING: "log_level formatter configure_logging pylogging_config_file"}
    ),
    "compilation_config": Section(
        of="CompilationConfig",
        cannot={
            ROUNDING: "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder "
            "cudagraph_mm_encoder encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch "
            "encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes "
            "decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints inductor_compile_config "
            "inductor_passes cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs "
            "cudagraph_specialize_lora use_inductor_graph_partition max_cudagraph_capture_size enabled_custom_ops "
            "disabled_custom_ops",
            BUILDING: "debug_dump_path cache_dir compile_cache_save_format local_cache_dir fast_moe_cold_start "
            "traced_files compilation_time encoder_compilation_time static_all_moe_layers",
            "holds the layers, of which kv_encoding says what they write": "static_forward_context",
        },
        parts="pass_config dynamic_shapes_config",
    ),
    "compilation_config.pass_config": Section(
        of="PassConfig",
        cannot={
            ROUNDING: "fuse_norm_quant fuse_act_quant fuse_attn_quant eliminate_noops fuse_allreduce_rms "
            "enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding fuse_mla_dual_rms_norm "
            "fuse_rope_kvcache fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num "
            "fi_allreduce_fusion_max_size_mb enable_sp fuse_gemm_comms sp_min_token_num"
        },
    ),
    "compilation_config.dynamic_shapes_config": Section(
        of="DynamicShapesConfig", cannot={BUILDING: "type evaluate_guards assume_32_bit_indexing"}
    ),
    "profiler_config": Section(
        of="ProfilerConfig",
        cannot={
            WATCHING: "profiler torch_profiler_dir torch_profiler_activities proton_profiler_dir proton_context "
            "proton_data proton_backend proton_mode proton_hook proton_output_format proton_graph_attribution "
            "torch_profiler_with_stack torch_profiler_with_flops torch_profiler_use_gzip "
            "torch_profiler_dump_cuda_time_total torch_profiler_record_shapes torch_profiler_with_memory "
            "capture_torch_profiler detailed_trace_annotation ignore_frontend delay_iterations max_iterations "
            "warmup_iterations active_iterations wait_iterations"
        },
    ),
    "kv_transfer_config": Section(
        of="KVTransferConfig",
        elsewhere={"chunk_tokens, weights: the settings of this package": "kv_connector_extra_config"},
        cannot={
            PLACE: "engine_id kv_buffer_device kv_role kv_port kv_ip kv_rank kv_parallel_size",
            MEMORY: "kv_buffer_size",
            OTHER_CONNECTORS: "enable_permute_local_kv",
            "names this connector": "kv_connector kv_connector_module_path",
            "what vLLM does when a load fails; this connector sets it": "kv_load_failure_policy",
        },
    ),
    "kv_events_config": Section(
        of="KVEventsConfig",
        cannot={
            WATCHING: "enable_kv_cache_events publisher endpoint replay_endpoint buffer_steps hwm max_queue_size topic"
        },
    ),
    "ec_transfer_config": Section(
        of="ECTransferConfig",
        # Embeddings of images come from elsewhere then.
        enters="ec_connector ec_connector_module_path",
        cannot={
            PLACE: "engine_id ec_role ec_ip ec_port ec_rank ec_parallel_size ec_connector_extra_config",
            MEMORY: "ec_buffer_device ec_buffer_size mm_encoder_output_widths",
        },
    ),
    "ec_manager_config": Section(
        of="EncoderCacheManagerConfig", enters="encoder_cache_manager_cls", secret="manager_config"
    ),
    "reasoning_config": Section(
        of="ReasoningConfig",
        cannot={
            SAMPLING: "reasoning_parser reasoning_start_str reasoning_end_str _reasoning_start_token_ids "
            "_reasoning_end_token_ids _natural_reasoning_end_token_ids _enabled"
        },
    ),
    "weight_transfer_config": Section(
        of="WeightTransferConfig", cannot={"how new weights arrive; a reset follows them": "backend"}
    ),
    "watchdog_config": Section(of="WatchdogConfig", cannot={WATCHING: "check_interval dump_dir timeout"}),
    ENVIRONMENT: Section(
        of=ENVIRONMENT,
        enters="VLLM_FLOAT32_MATMUL_PRECISION VLLM_BATCH_INVARIANT VLLM_MLA_DISABLE VLLM_USE_TRITON_AWQ "
        "VLLM_DISABLED_KERNELS VLLM_USE_HW_AGNOSTIC VLLM_USE_OINK_OPS VLLM_ENABLE_HPC_OPS "
        "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_MARLIN_INPUT_DTYPE "
        "VLLM_MARLIN_USE_ATOMIC_ADD VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG "
        "VLLM_HUMMING_USE_F16_ACCUM VLLM_HUMMING_MOE_GEMM_TYPE VLLM_B12X_MOE_FP4_FORCE_A16 "
        "VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 "
        "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER "
        "VLLM_USE_FLASHINFER_MOE_INT4 VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
        "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_CPU_INT4_W4A8 VLLM_XPU_INC_WNA16_BACKEND "
        "VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE "
        "VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2 "
        "VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA "
        "VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA "
        "VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM "
        "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_SKINNY_GEMM "
        "VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_MONO_DECODE VLLM_ROCM_MUSE_MOE_ONLINE_QUANT "
        "VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_QUICK_REDUCE_QUANTIZATION "
        "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB "
        "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB "
        "VLLM_TEST_FORCE_LOAD_FORMAT VLLM_PLUGINS VLLM_VIDEO_LOADER_BACKEND VLLM_MEDIA_CONNECTOR",
        recurrent="VLLM_SSM_CONV_STATE_LAYOUT VLLM_GDN_DECODE_KERNEL VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE",
        elsewhere={
            "kv_layout": "VLLM_KV_CACHE_LAYOUT",
            "kv_encoding": "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_TARGET_DEVICE",
            "model_runner": "VLLM_USE_V2_MODEL_RUNNER",
            "geometry": "VLLM_PP_LAYER_PARTITION VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
            "max_model_len": "VLLM_ALLOW_LONG_MAX_MODEL_LEN",
            "weights": "VLLM_MODEL_REDIRECT_PATH VLLM_USE_MODELSCOPE",
        },
        cannot={
            ROUNDING: "VLLM_CPU_ATTN_SPLIT_KV VLLM_TRITON_USE_TD VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK "
            "VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_LAYERNAME "
            "VLLM_ENABLE_PREGRAD_PASSES VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE "
            "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TUNED_CONFIG_FOLDER "
            "VLLM_PATTERN_MATCH_DEBUG VLLM_REPLICATE_EMBED VLLM_DCP_Q_REPLICATE VLLM_USE_DIRECT_DCP_A2A "
            "VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_MOE_SKIP_PADDING "
            "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT "
            "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_GEMM_RS VLLM_ENABLE_GEMM_RS "
            "VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD "
            "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
            "VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD "
            "VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS "
            "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_AITER_MLA_ASM_PADDING "
            "VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ALLREDUCE_USE_SYMM_MEM "
            "VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_FLASHINFER_ALLREDUCE_BACKEND "
            "VLLM_USE_NCCL_SYMM_MEM VLLM_DISABLE_PYNCCL VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM "
            "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
            "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DEEPEP_V2_PREFER_OVERLAP "
            "VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_ENABLE_XPU_GRAPH "
            "VLLM_XPU_PP_MICROBATCH VLLM_XLA_USE_SPMD VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_DBO_COMM_SMS",
            SAMPLING: "VLLM_USE_FLASHINFER_SAMPLER VLLM_XPU_USE_SAMPLER_KERNEL VLLM_V1_USE_OUTLINES_CACHE "
            "VLLM_XGRAMMAR_CACHE_MB VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_STOP_STRINGS "
            "VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT "
            "VLLM_REGEX_COMPILATION_TIMEOUT_S",
            MEMORY: "VLLM_CPU_KVCACHE_SPACE VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE "
            "VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_WSL2_ENABLE_PIN_MEMORY "
            "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_ENABLE_CUDAGRAPH_GC "
            "VLLM_PLE_CPU_OFFLOAD VLLM_DEBUG_WORKSPACE VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_MQ_MAX_CHUNK_BYTES_MB "
            "VLLM_USE_SIMPLE_KV_OFFLOAD VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS "
            "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN",
            PLACE: "CUDA_HOME CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH LOCAL_RANK VLLM_CACHE_ROOT VLLM_CONFIG_ROOT "
            "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND "
            "VLLM_CPU_CI_ENV VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_ENABLE_CUDA_COMPATIBILITY "
            "VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK "
            "VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_HOST_IP "
            "VLLM_LOOPBACK_IP VLLM_PORT VLLM_RPC_BASE_PATH VLLM_PROCESS_NAME_PREFIX VLLM_GPU_NIC_PCIE_MAPPING "
            "VLLM_NIC_SELECTION_VARS VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_RAY_BUNDLE_INDICES "
            "VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY "
            "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS VLLM_SKIP_P2P_CHECK "
            "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_WORKER_MULTIPROC_METHOD "
            "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_TPU_USING_PATHWAYS "
            "VLLM_USE_SPINLOOP_EXT VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ELASTIC_EP_DRAIN_REQUESTS "
            "VLLM_RANDOMIZE_DP_DUMMY_INPUTS",
            OTHER_CONNECTORS: "MOONCAKE_PREFERRED_SEGMENT MOONCAKE_REQUESTER_LOCAL_HOSTNAME "
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT "
            "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG "
            "VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_HANDSHAKE_TIMEOUT_S "
            "VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT",
            LOADING: "S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY VLLM_FASTSAFETENSORS_QUEUE_SIZE",
            BUILDING: "CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VERBOSE VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE "
            "VLLM_BUILD_URL VLLM_IMAGE_TAG VLLM_DOCKER_BUILD_CONTEXT VLLM_MAIN_CUDA_VERSION "
            "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_USE_PRECOMPILED "
            "VLLM_USE_PRECOMPILED_RUST VLLM_HAS_FLASHINFER_CUBIN VLLM_COMPILE_CACHE_SAVE_FORMAT "
            "VLLM_DISABLE_COMPILE_CACHE VLLM_FORCE_AOT_LOAD VLLM_DEEP_GEMM_WARMUP VLLM_ENABLE_STARTUP_PLAN "
            "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_TRITON_JIT_WARMUP_NUM_THREADS "
            "VLLM_XLA_CACHE_PATH VLLM_XLA_CHECK_RECOMPILATION",
            SERVING: "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_API_KEY "
            "VLLM_AUDIO_FETCH_TIMEOUT VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT "
            "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL VLLM_DISABLE_REQUEST_ID_RANDOMIZATION "
            "VLLM_ENABLE_COHERE_API VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING "
            "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_HTTP_TIMEOUT_KEEP_ALIVE "
            "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MAX_AUDIO_PREPROCESS_WORKERS "
            "VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES "
            "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_RUST_FRONTEND_PATH "
            "VLLM_SERVER_DEV_MODE VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE "
            "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS "
            "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND "
            "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
            LIMIT: "VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S "
            "VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS "
            "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES "
            "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_N_SEQUENCES VLLM_HTTP_MAX_REQUEST_BODY_SIZE",
            WATCHING: "FORCE_COLOR NO_COLOR VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING "
            "VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO "
            "VLLM_DO_NOT_TRACK VLLM_ENGINE_READY_TIMEOUT_S VLLM_ENGINE_ITERATION_TIMEOUT_S "
            "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
            "VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM "
            "VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_NO_USAGE_STATS "
            "VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_REQUEST_BODY_LOG_LEVEL VLLM_RINGBUFFER_WARNING_INTERVAL "
            "VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        },
    ),
}
"""Path of a part of ``VllmConfig`` -> what its fields are."""

OFF: Final[Mapping[str, object]] = {
    "attention_config.indexer_sparse_logits": False,
    "attention_config.minimax_m3_indexer_cp": False,
    "attention_config.trtllm_ragged_backend": "trtllm-gen",
    "kernel_config.monokernel": False,
    "parallel_config.sd_worker_cls": "auto",
}
"""Fields that enter and that not every version of the window has, with the value that does what versions without do.

At this value a field is left out of the record, or versions that ``share_vllm_versions`` lets share never would. At any
other value it enters. All other fields are written whatever their value, so that a default that a version changes is a
difference and no accident.
"""

OFF_UNLESS_SET: Final = (
    "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE "
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4 "
    "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_MONO_DECODE "
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE"
)
"""The same of variables: those that not every version has are left out where they are not set."""
