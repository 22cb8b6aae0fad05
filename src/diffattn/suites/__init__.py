"""Claims of the papers on any language model: items, measures, intervals, cards."""
