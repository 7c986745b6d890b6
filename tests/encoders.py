"""A tiny encoder in the format of Hugging Face, made on the spot."""

import json
from pathlib import Path

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def write_tokenizer(folder: Path, extra: tuple[str, ...] = ()) -> int:
    """A tokenizer of word pieces: a few words, and letters for the rest. Returns the number of ids."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film", "day", *extra]
    vocabulary = {w: i for i, w in enumerate([*words, *LETTERS, *(f"##{c}" for c in LETTERS)])}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    made.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": inputs, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return len(vocabulary)


def write_encoder(folder: Path, width: int = 16, layers: int = 1, positions: int = 32) -> Path:
    """A BERT of that size with random weights and its tokenizer."""
    import torch
    from transformers import BertConfig, BertModel

    folder.mkdir(parents=True, exist_ok=True)
    size = write_tokenizer(folder)
    config = BertConfig(
        vocab_size=size, hidden_size=width, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=width,
        max_position_embeddings=positions,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return folder
