"""What every operation means, in plain numpy, written to be read.

The CPU and CUDA versions agree with these functions bit for bit in integers, and in floats within the tolerances of
plans/0003-numerics.md. They take numpy arrays with the shapes and types of `kdtree_engine`'s functions of the same
name, check nothing, and are slow.
"""

from .argmax import argmax
from .kv_compact import kv_compact
from .merge_attn_states import merge_attn_states
from .sample import sample
from .topk_logprobs import topk_logprobs
from .topk_merge import topk_merge
from .tree_accept import tree_accept
from .tree_build import tree_build
from .tree_from_parents import tree_from_parents
from .tree_from_visibility import tree_from_visibility
from .verify_attn import verify_attn

__all__ = [
    "argmax",
    "kv_compact",
    "merge_attn_states",
    "sample",
    "topk_logprobs",
    "topk_merge",
    "tree_accept",
    "tree_build",
    "tree_from_parents",
    "tree_from_visibility",
    "verify_attn",
]
