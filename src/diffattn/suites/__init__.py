"""Claims of the papers on any language model: items, measures, intervals, cards."""

SUITES = ("loss", "retrieval", "attention", "icl")
"""modules of this package, each a `diffattn.suites.suite.Suite`"""
