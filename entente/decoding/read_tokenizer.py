"""Reads a model's tokenizer as `AutoTokenizer` of transformers does.

`AutoTokenizer` imports torch, so this module chooses the class itself; a test compares the two. The class adds named special
tokens that tokenizer.json lacks, and some classes rebuild the tokenizer from its vocabulary. Truncation and padding from the file
are disabled, as in each call of transformers. This module does not encode prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from entente.decoding.architectures import FAMILIES
from entente.decoding.model_files import read_config, read_tokenizer_config
from entente.telemetry.errors import InputError, first_line

_STARTED = ("LlamaTokenizer", "GemmaTokenizer")
"""Classes whose models were trained with a start token, unless `add_bos_token` is false. transformers 5 reads it only from
tokenizer.json, where converted tokenizers lack it."""
_ANY_TEXT = "A PAR H"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTokenizer:
    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    """Text of each named special token, such as `bos_token`, which chat templates refer to."""
    start_ids: tuple[int, ...]
    """Ids before a text without a chat template: the start token, or empty."""


def read_tokenizer(folder: Path) -> ModelTokenizer:
    """Raises InputError if the tokenizer cannot be read, or does not round-trip a text."""
    import transformers

    config, files = read_config(folder), read_tokenizer_config(folder)
    named = str(files.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")
    name = _class_name(str(config.get("model_type")), named)
    plain = transformers.PreTrainedTokenizerFast
    chosen = getattr(transformers, name, None)
    reader = chosen if isinstance(chosen, type) and issubclass(chosen, plain) else plain
    try:
        loaded = reader.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # transformers raises many unrelated types for a damaged file; the user's cure is the same.
        raise InputError(
            f"the tokenizer of model '{folder}' cannot be read ({first_line(error)}): copy or download it again"
        ) from error
    tokenizer: Tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoded = tokenizer.encode(_ANY_TEXT)
    start_ids = tuple(encoded.ids[: encoded.special_tokens_mask.index(0)]) if 0 in encoded.special_tokens_mask else ()
    if reader is not plain and tokenizer.decode(encoded.ids).strip() != _ANY_TEXT:
        raise InputError(
            f"the tokenizer of model '{folder}' loses letters when it is read as a {name}: set tokenizer_class in its "
            "tokenizer_config.json to 'PreTrainedTokenizerFast', which a qwen2 ignores, or use another model"
        )
    adds_start = files.get("add_bos_token", name in _STARTED or named in _STARTED)
    if not start_ids and loaded.bos_token_id is not None and adds_start:
        start_ids = (loaded.bos_token_id,)
    return ModelTokenizer(tokenizer=tokenizer, special_tokens=loaded.special_tokens_map, start_ids=start_ids)


def _class_name(model_type: str, named: str) -> str:
    family = FAMILIES.get(model_type)
    if family is not None and (family.same_tokenizer or not named):
        return family.tokenizer
    return named
