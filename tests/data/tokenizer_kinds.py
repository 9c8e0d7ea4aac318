"""Small tokenizers of every kind that models come with, made in memory."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CORPUS = [
    "the cat sat on the mat . user : what is a cat ? assistant : the cat is an animal \n",
    "system : be kind ! user assistant 1 + 1 = 2 , 2 + 2 = 4 thanks \n",
] * 10
CHARACTERS = sorted(set("".join(CORPUS)) | set("<|>_/ imstarend"))


def _wrapped(tokenizer: Tokenizer, *, adds_begin: bool = False) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    if adds_begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )


def byte_level_bpe() -> PreTrainedTokenizerFast:
    """As GPT-2, Llama 3, Qwen; it adds `<s>` in front, as Llama 3 does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(tokenizer, adds_begin=True)


def sentencepiece_bpe() -> LlamaTokenizer:
    """transformers' own LlamaTokenizer: `▁` for a space, and one in front of the text; `▁the` and `▁cat` are words."""
    tokens = [*SPECIAL, *CHARACTERS, "▁"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("t", "h"), ("th", "e"), ("▁", "c"), ("▁c", "a"), ("▁ca", "t")]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = LlamaTokenizer(vocab=vocabulary, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[3:])})
    return tokenizer


def old_llama() -> PreTrainedTokenizerFast:
    """The first Llama's tokenizer.json: `▁` by a normalizer, in front of the text too; unknown bytes as such."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*SPECIAL, *pieces, *CHARACTERS, "▁", "▁t", "▁th", "▁the", "th", "the"]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("t", "h"), ("th", "e")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _wrapped(tokenizer, adds_begin=True)


def unigram() -> PreTrainedTokenizerFast:
    """As T5, with a `▁` in front of the text and behind every special token."""
    scores = [(token, 0.0) for token in SPECIAL]
    scores += [(word, -1.0) for word in ("▁the", "▁cat", "the", "cat", "▁user", "assistant")]
    scores += [(character, -6.0) for character in dict.fromkeys([*CHARACTERS, "▁"])]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _wrapped(tokenizer)


def word_piece() -> PreTrainedTokenizerFast:
    """As BERT: words and `##` pieces, no white space at all."""
    words = ["the", "cat", "user", "system"]
    tokens = [*SPECIAL, *words, *CHARACTERS, *(f"##{character}" for character in CHARACTERS)]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _wrapped(tokenizer)


def word_level() -> PreTrainedTokenizerFast:
    """One token per word; most single characters are none."""
    words = sorted({word for line in CORPUS for word in line.split()})
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _wrapped(tokenizer)


KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    function.__name__: function
    for function in (byte_level_bpe, sentencepiece_bpe, old_llama, unigram, word_piece, word_level)
}
