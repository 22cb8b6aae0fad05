"""DEX: differential attention for models that are already trained.

    O'_h = O_h - lam(t) O_h W_D  for selected heads h, just before the output projection

Source: Kong et al., arXiv 2505.16333.
"""

from diffattn.dex.adapter import disable, inject, set_step, unload
from diffattn.dex.callback import DexCallback
from diffattn.dex.config import DexConfig
from diffattn.dex.merge import merge, unmerge
from diffattn.dex.plan import HeadPlan
from diffattn.dex.selection import select_heads
from diffattn.dex.sites import Site, find_sites
from diffattn.dex.storage import load, save

__all__ = [
    "DexCallback",
    "DexConfig",
    "HeadPlan",
    "Site",
    "disable",
    "find_sites",
    "inject",
    "load",
    "merge",
    "save",
    "select_heads",
    "set_step",
    "unload",
    "unmerge",
]
