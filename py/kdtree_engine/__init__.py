"""kdtree-engine: native kernels for DDTree speculative decoding on MLA models.

    import kdtree_engine as kdt

    tree = kdt.tree_build(log_probs, token_ids, root_tokens, prefix_lens, budget=64)
    accepted = kdt.tree_accept(tree, target_tokens, stop_tokens=[2])
    kdt.kv_compact(kv_cache, accepted, prefix_lens, block_table=block_table)

`kdtree_engine.reference` says in plain numpy what each operation means; `kdtree_engine.kdtr` reads and writes
KDTR files. The command is `kdtree`.
"""

from . import kdtr, reference
from ._context import Context, backends, build_info
from ._cuda import DeviceArray, Stream
from ._errors import (
    KdtError,
    KdtrError,
    KdtValueError,
    LibraryNotFoundError,
    MissingExtraError,
    NoDeviceError,
    Status,
)
from .kdtr import bfloat16
from .ops import (
    argmax,
    kv_compact,
    merge_attn_states,
    sample,
    topk_logprobs,
    topk_merge,
    tree_accept,
    tree_build,
    tree_build_workspace_size,
    tree_from_parents,
    tree_from_visibility,
    verify_attn,
)
from .types import Accepted, StatusFlag, Tree

__version__ = "0.1.0"

__all__ = [
    "Accepted",
    "Context",
    "DeviceArray",
    "KdtError",
    "KdtValueError",
    "KdtrError",
    "LibraryNotFoundError",
    "MissingExtraError",
    "NoDeviceError",
    "Status",
    "StatusFlag",
    "Stream",
    "Tree",
    "argmax",
    "backends",
    "bfloat16",
    "build_info",
    "kdtr",
    "kv_compact",
    "merge_attn_states",
    "reference",
    "sample",
    "topk_logprobs",
    "topk_merge",
    "tree_accept",
    "tree_build",
    "tree_build_workspace_size",
    "tree_from_parents",
    "tree_from_visibility",
    "verify_attn",
]
