"""Tokenizers of several sizes: Tekken, which `mistral_common` ships, cut to its first ids.

Tekken's ids rise with the rank of their merges, after 1,000 special ones. So its first N ids are the tokenizer that the same
training would have given with a vocabulary of N.
"""

import json
import shutil
from pathlib import Path

from benchmarks.large_vocabulary import make_large_vocabulary_model
from decoding.model_files import make_whole

SIZES = {"4k": 4_096, "32k": 32_768, "131k": 131_072}
"""Sizes of vocabularies, by the last word of a figure."""
_COPIED = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def tokenizer_folder(root: Path, size: int) -> Path:
    """A folder with a tokenizer of `size` ids and a model config under `root`; made if missing.

    Returns:
        a folder that `Codec` and transformers can load a tokenizer from. It holds no weights, except for the largest size.
    """
    whole = make_large_vocabulary_model(root)
    if size == SIZES["131k"]:
        return whole

    def cut(folder: Path) -> None:
        tokenizer = cut_tokenizer(json.loads((whole / "tokenizer.json").read_text()), size)
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        for name in _COPIED:
            if (whole / name).is_file():
                shutil.copy(whole / name, folder)
        config = json.loads((whole / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))

    return make_whole(root / f"tekken-{size}", "config.json", cut)


def cut_tokenizer(tokenizer: dict, size: int) -> dict:
    """The content of a `tokenizer.json` without the ids from `size` on, and without the merges that make them."""
    model = tokenizer["model"]
    vocabulary = {token: number for token, number in model["vocab"].items() if number < size}
    # A part of a merge may have a higher id than the token that it makes.
    merges = [merge for merge in model["merges"] if {"".join(_pair(merge)), *_pair(merge)} <= vocabulary.keys()]
    added = [token for token in tokenizer["added_tokens"] if token["id"] < size]
    return tokenizer | {"model": model | {"vocab": vocabulary, "merges": merges}, "added_tokens": added}


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge
