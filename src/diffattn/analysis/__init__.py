"""What attention does inside: redundancy of heads."""

from diffattn.analysis.redundancy import HeadRedundancy, head_redundancy

__all__ = ["HeadRedundancy", "head_redundancy"]
