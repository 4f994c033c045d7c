"""Tokenizers for the tiny models, built on the spot: no download, the same on every machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

# Enough English and Python for common words to be one token; any other text falls into bytes.
SAMPLE = (
    "the quick brown fox jumps over the lazy dog while a search engine returns documents",
    "Retrieve images or text relevant to the user's query. Represent the user's input.",
    "system user assistant query document image text page table figure screenshot answer",
    "def function(self, name, value=None): return self.value if name in self.items else None",
    "import os, sys, re  # read the file, split the lines and count the words in the list",
    "for index, line in enumerate(lines): result.append(line.strip().lower())",
    "class Parser(object): raise ValueError('expected a number, got a string') from error",
)
END = "<|endoftext|>"
CHAT_SPECIALS = (
    END,
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# How Qwen2 and its successors cut text before merging bytes.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def wordpiece_tokenizer(
    texts: Sequence[str] = SAMPLE, *, vocab_size: int = 600, max_length: int = 128
) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece tokenizer in BERT's form, [CLS] text [SEP]: the printable ASCII
    characters and the most frequent words of `texts`."""
    # The library's own WordPiece trainer numbers the pieces differently on every run.
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters]
    pieces += ["##" + character for character in characters]
    split, lower = pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=True)
    counts = Counter(
        word for text in texts for word, _ in split.pre_tokenize_str(lower.normalize_str(text))
    )
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    pieces += [word for word in by_frequency if len(word) > 1][: max(0, vocab_size - len(pieces))]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = lower
    tokenizer.pre_tokenizer = split
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    tokenizer.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def byte_tokenizer(
    texts: Sequence[str] = SAMPLE,
    *,
    vocab_size: int = 600,
    max_length: int = 2048,
    append_end: bool = False,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Qwen's special tokens and chat template.

    Args:
        append_end: put <|endoftext|> behind every text, as Qwen3-Embedding's tokenizer does.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CHAT_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if append_end:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {END}", special_tokens=[(END, tokenizer.token_to_id(END))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        pad_token=END,
        eos_token="<|im_end|>",
        extra_special_tokens=list(CHAT_SPECIALS),
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast
