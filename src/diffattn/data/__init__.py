"""Training data: documents, tokenizers, token streams, generated recall sequences."""

from diffattn.data.answers import AnswerItem, encode_answers, starts_with_bos
from diffattn.data.corpus import Document, corpus_digest, load_documents, split_documents
from diffattn.data.many_shot import many_shot_items, query_documents
from diffattn.data.mixture import RecallStage, TrainingStream
from diffattn.data.needles import needle_items
from diffattn.data.packing import TokenFile, Windows, write_tokens
from diffattn.data.recall import (
    RecallItem,
    RecallSequence,
    RecallSpec,
    RecallStream,
    RecallTokens,
    distractor,
    make_recall,
    oracle,
    recall_grid,
)
from diffattn.data.text_stream import TextStream
from diffattn.data.tokenizer import cached_tokenizer, load_tokenizer, train_tokenizer

__all__ = [
    "AnswerItem",
    "Document",
    "RecallItem",
    "RecallSequence",
    "RecallSpec",
    "RecallStage",
    "RecallStream",
    "RecallTokens",
    "TextStream",
    "TokenFile",
    "TrainingStream",
    "Windows",
    "cached_tokenizer",
    "corpus_digest",
    "distractor",
    "encode_answers",
    "load_documents",
    "load_tokenizer",
    "make_recall",
    "many_shot_items",
    "needle_items",
    "oracle",
    "query_documents",
    "recall_grid",
    "split_documents",
    "starts_with_bos",
    "train_tokenizer",
    "write_tokens",
]
