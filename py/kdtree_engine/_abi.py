"""The C ABI in ctypes: structs as in include/kdtree/kdtree.h, in the header's order (a test compares them)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

ABI_MAJOR = 1

BACKENDS = {"cpu": 0, "cuda": 1}


class _Struct(ctypes.Structure):
    """A parameter struct: zero but for its size."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(struct_size=ctypes.sizeof(self), **fields)


class ContextParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("backend", c_int32),
        ("device", c_int32),
        ("num_threads", c_int32),
        ("reserved0", c_int32),
    ]


class DeviceInfo(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("name", c_char * 256),
        ("memory_bytes", c_int64),
        ("compute_capability", c_int32),
        ("kernel_architecture", c_int32),
        ("multiprocessors", c_int32),
        ("max_shared_memory_bytes", c_int32),
    ]


class TreeStruct(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch_size", c_int32),
        ("num_slots", c_int32),
        ("slot_stride", c_int64),
        ("visibility_stride", c_int64),
        ("visibility_pitch", c_int64),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("first_child", c_void_p),
        ("next_sibling", c_void_p),
        ("depths", c_void_p),
        ("positions", c_void_p),
        ("log_probs", c_void_p),
        ("visibility", c_void_p),
        ("node_count", c_void_p),
        ("status", c_void_p),
    ]


class TreeBuildParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("depth", c_int32),
        ("num_candidates", c_int32),
        ("budget", c_int32),
        ("vocab_size", c_int32),
        ("log_probs", c_void_p),
        ("log_probs_stride", c_int64),
        ("log_probs_row_stride", c_int64),
        ("token_ids", c_void_p),
        ("token_ids_stride", c_int64),
        ("token_ids_row_stride", c_int64),
        ("root_tokens", c_void_p),
        ("prefix_lens", c_void_p),
        ("budgets", c_void_p),
        ("max_depths", c_void_p),
        ("num_live", c_void_p),
        ("tree", POINTER(TreeStruct)),
        ("spine_len", c_int32),
        ("reserved0", c_int32),
        ("min_scores", c_void_p),
        ("depth_costs", c_void_p),
    ]


class TreeFromParentsParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("tokens", c_void_p),
        ("tokens_stride", c_int64),
        ("parents", c_void_p),
        ("parents_stride", c_int64),
        ("node_counts", c_void_p),
        ("prefix_lens", c_void_p),
        ("num_live", c_void_p),
        ("tree", POINTER(TreeStruct)),
    ]


class TreeFromVisibilityParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("mask", c_void_p),
        ("mask_stride", c_int64),
        ("mask_row_stride", c_int64),
        ("tokens", c_void_p),
        ("tokens_stride", c_int64),
        ("node_counts", c_void_p),
        ("prefix_lens", c_void_p),
        ("num_live", c_void_p),
        ("tree", POINTER(TreeStruct)),
    ]


class TreeAcceptParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("tree", POINTER(TreeStruct)),
        ("target_tokens", c_void_p),
        ("target_tokens_stride", c_int64),
        ("max_tokens", c_void_p),
        ("stop_tokens", c_void_p),
        ("num_stop_tokens", c_int32),
        ("max_len", c_int32),
        ("num_live", c_void_p),
        ("tokens", c_void_p),
        ("tokens_stride", c_int64),
        ("accept_index", c_void_p),
        ("accept_index_stride", c_int64),
        ("token_count", c_void_p),
        ("accept_len", c_void_p),
        ("next_root", c_void_p),
        ("finished", c_void_p),
        ("status", c_void_p),
        ("target_log_probs", c_void_p),
        ("log_probs", c_void_p),
    ]


class KvCacheStruct(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("data", c_void_p),
        ("layer_data", POINTER(c_void_p)),
        ("num_layers", c_int32),
        ("num_pages", c_int32),
        ("page_size", c_int32),
        ("row_width", c_int32),
        ("element_size", c_int32),
        ("max_pages", c_int32),
        ("layer_stride", c_int64),
        ("page_stride", c_int64),
        ("row_stride", c_int64),
        ("block_table", c_void_p),
        ("block_table_stride", c_int64),
    ]


class KvCompactParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch_size", c_int32),
        ("num_slots", c_int32),
        ("max_len", c_int32),
        ("reserved0", c_int32),
        ("cache", POINTER(KvCacheStruct)),
        ("destination", POINTER(KvCacheStruct)),
        ("accept_index", c_void_p),
        ("accept_index_stride", c_int64),
        ("accept_len", c_void_p),
        ("prefix_lens", c_void_p),
        ("num_live", c_void_p),
        ("status", c_void_p),
    ]


class TopkLogprobsParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("num_candidates", c_int32),
        ("logits_dtype", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("raw", c_int32),
        ("id_offset", c_int32),
        ("log_probs", c_void_p),
        ("log_probs_stride", c_int64),
        ("token_ids", c_void_p),
        ("token_ids_stride", c_int64),
        ("lse", c_void_p),
        ("num_live", c_void_p),
        ("rows_per_request", c_int32),
        ("reserved0", c_int32),
        ("status", c_void_p),
        ("allowed", c_void_p),
    ]


class TopkMergeParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_shards", c_int32),
        ("num_rows", c_int32),
        ("num_candidates", c_int32),
        ("rows_per_request", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("logits_row_stride", c_int64),
        ("shard_token_ids", c_void_p),
        ("shard_token_ids_stride", c_int64),
        ("shard_token_ids_row_stride", c_int64),
        ("shard_lse", c_void_p),
        ("shard_lse_stride", c_int64),
        ("log_probs", c_void_p),
        ("log_probs_stride", c_int64),
        ("token_ids", c_void_p),
        ("token_ids_stride", c_int64),
        ("lse", c_void_p),
        ("num_live", c_void_p),
        ("status", c_void_p),
    ]


class ArgmaxParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("logits_dtype", c_int32),
        ("id_offset", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("tokens", c_void_p),
        ("values", c_void_p),
        ("num_live", c_void_p),
        ("rows_per_request", c_int32),
        ("reserved0", c_int32),
        ("status", c_void_p),
        ("allowed", c_void_p),
    ]


class SampleParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("logits_dtype", c_int32),
        ("id_offset", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("seed", c_uint64),
        ("temperatures", c_void_p),
        ("positions", c_void_p),
        ("request_ids", c_void_p),
        ("tokens", c_void_p),
        ("values", c_void_p),
        ("num_live", c_void_p),
        ("rows_per_request", c_int32),
        ("reserved0", c_int32),
        ("status", c_void_p),
        ("allowed", c_void_p),
    ]


class VerifyAttnParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch_size", c_int32),
        ("num_queries", c_int32),
        ("num_heads", c_int32),
        ("qk_dim", c_int32),
        ("v_dim", c_int32),
        ("q_dtype", c_int32),
        ("kv_dtype", c_int32),
        ("out_dtype", c_int32),
        ("lse_base", c_int32),
        ("scale", c_float),
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("q_row_stride", c_int64),
        ("q_head_stride", c_int64),
        ("cache", POINTER(KvCacheStruct)),
        ("prefix_lens", c_void_p),
        ("kv_starts", c_void_p),
        ("tree", POINTER(TreeStruct)),
        ("num_live", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse", c_void_p),
        ("lse_stride", c_int64),
        ("lse_row_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("status", c_void_p),
        ("qo_indptr", c_void_p),
        ("q_rope", c_void_p),
        ("kv_rope", c_void_p),
        ("kv_scales", c_void_p),
        ("split_len", c_int32),
        ("reserved0", c_int32),
    ]


class MergeAttnStatesParams(_Struct):
    _fields_ = [
        ("struct_size", c_size_t),
        ("num_rows", c_int32),
        ("num_heads", c_int32),
        ("v_dim", c_int32),
        ("lse_base", c_int32),
        ("a_dtype", c_int32),
        ("b_dtype", c_int32),
        ("out_dtype", c_int32),
        ("rows_per_request", c_int32),
        ("a", c_void_p),
        ("a_row_stride", c_int64),
        ("a_head_stride", c_int64),
        ("a_lse", c_void_p),
        ("a_lse_row_stride", c_int64),
        ("a_lse_head_stride", c_int64),
        ("b", c_void_p),
        ("b_row_stride", c_int64),
        ("b_head_stride", c_int64),
        ("b_lse", c_void_p),
        ("b_lse_row_stride", c_int64),
        ("b_lse_head_stride", c_int64),
        ("out", c_void_p),
        ("out_row_stride", c_int64),
        ("out_head_stride", c_int64),
        ("lse", c_void_p),
        ("lse_row_stride", c_int64),
        ("lse_head_stride", c_int64),
        ("num_live", c_void_p),
    ]


OPERATIONS: dict[str, type[_Struct]] = {
    "tree_build": TreeBuildParams,
    "tree_from_parents": TreeFromParentsParams,
    "tree_from_visibility": TreeFromVisibilityParams,
    "tree_accept": TreeAcceptParams,
    "kv_compact": KvCompactParams,
    "topk_logprobs": TopkLogprobsParams,
    "topk_merge": TopkMergeParams,
    "argmax": ArgmaxParams,
    "sample": SampleParams,
    "verify_attn": VerifyAttnParams,
    "merge_attn_states": MergeAttnStatesParams,
}


def declare(library: ctypes.CDLL) -> None:
    """Gives the library's functions their types."""

    def function(name: str, result: Any, *arguments: Any) -> None:
        symbol = getattr(library, name)
        symbol.restype = result
        symbol.argtypes = arguments

    function("kdt_abi_version", c_int32)
    function("kdt_version", c_char_p)
    function("kdt_build_info", c_char_p)
    function("kdt_status_name", c_char_p, c_int32)
    function("kdt_last_error", c_char_p)
    function("kdt_context_create", c_int32, POINTER(ContextParams), POINTER(c_void_p))
    function("kdt_context_destroy", None, c_void_p)
    function("kdt_context_get", c_int32, c_void_p, POINTER(ContextParams))
    function("kdt_device_count", c_int32, c_int32, POINTER(c_int32))
    function("kdt_device_query", c_int32, c_int32, c_int32, POINTER(DeviceInfo))
    for name, params in OPERATIONS.items():
        function(f"kdt_{name}_workspace_size", c_int32, c_void_p, POINTER(params), POINTER(c_size_t))
        function(f"kdt_{name}", c_int32, c_void_p, POINTER(params), c_void_p, c_size_t, c_void_p)
