"""What every operation means, in plain numpy, written to be read.

The CPU and CUDA versions agree with these functions bit for bit in integers. They take numpy arrays with the
shapes and types of `kdtree_engine`'s functions of the same name, check nothing, and are slow.
"""

from .kv_compact import kv_compact
from .tree_accept import tree_accept
from .tree_build import tree_build
from .tree_from_parents import tree_from_parents
from .tree_from_visibility import tree_from_visibility

__all__ = ["kv_compact", "tree_accept", "tree_build", "tree_from_parents", "tree_from_visibility"]
